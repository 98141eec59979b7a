#pragma once

#include <cuda_runtime_api.h>

#include "core/base/error.h"
#include "core/base/memory.h"

namespace tessera::cuda {

/// " (the device has 1.50 GiB free of 79.1 GiB; ...)" for the current device; empty if unknown.
inline std::string memory_of_device() {
  std::size_t free = 0, total = 0;
  const bool known = cudaMemGetInfo(&free, &total) == cudaSuccess;
  cudaGetLastError();
  if (!known) return {};
  return fmt::format(" (the device has {} free of {}; other processes may hold the rest)",
                     format_bytes(static_cast<std::int64_t>(free)),
                     format_bytes(static_cast<std::int64_t>(total)));
}

/// @param what  the call, for the message: "cudaMalloc of 3.0 GiB"
/// @throws OutOfMemory, CudaError with the runtime's name and description of the status
inline void check(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();                       // clears the error for the next call
  if (status == cudaErrorMemoryAllocation)  // an allocation of CUDA's own, not in the ledger
    throw OutOfMemory("{}: the GPU has no memory left{}", what, memory_of_device());
  throw CudaError("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

}  // namespace tessera::cuda
