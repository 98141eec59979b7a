#pragma once

#include <cuda_runtime_api.h>

#include "core/base/error.h"

namespace tessera::cuda {

/// @param what  the call, for the message: "cudaMalloc of 3.0 GiB"
/// @throws OutOfMemory, CudaError with the runtime's name and words for the status
inline void check(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();                       // so that the next call does not report it again
  if (status == cudaErrorMemoryAllocation)  // of the driver's own needs, beside the ledger
    throw OutOfMemory("{}: the GPU has no memory left", what);
  throw CudaError("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

}  // namespace tessera::cuda
