#include "kernels/cuda/launch.h"

#include <cuda_runtime_api.h>

#include "core/base/context.h"
#include "core/base/device_backend.h"

namespace tessera::kernels::cuda {

void launch_kernel(Context& context, const char* name, const void* kernel, const LaunchShape& shape,
                   void** params) {
  constexpr int kDefaultShared = 48 * 1024;  // more needs cudaFuncSetAttribute
  cudaError_t status = cudaSuccess;
  if (shape.shared_bytes > kDefaultShared) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  shape.shared_bytes);
    if (status == cudaErrorInvalidValue) {
      cudaGetLastError();
      throw Unsupported("{}: a block needs {} bytes of shared memory, more than the {} of this GPU",
                        name, shape.shared_bytes, context.limits().shared_bytes);
    }
  }
  if (status == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(shape.grid, shape.grid_y, shape.grid_z);
    config.blockDim = dim3(shape.block);
    config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
    config.stream = static_cast<cudaStream_t>(context.backend().stream());
    status = cudaLaunchKernelExC(&config, kernel, params);
  }
  if (status != cudaSuccess) {
    cudaGetLastError();  // so that the next call does not report it again
    throw CudaError("{}: {} x {} x {} blocks of {} threads with {} bytes of shared memory: {}",
                    name, shape.grid, shape.grid_y, shape.grid_z, shape.block, shape.shared_bytes,
                    cudaGetErrorString(status));
  }
}

}  // namespace tessera::kernels::cuda
