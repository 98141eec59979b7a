#pragma once

#include <cstddef>
#include <utility>

#include "core/base/context.h"
#include "core/base/error.h"
#include "kernels/cuda/device/platform.h"
#include "kernels/cuda/export.h"

// How the host functions of kernels/cuda start kernels.
namespace tessera::kernels::cuda {

struct LaunchShape {
  unsigned grid = 1;   ///< blocks
  unsigned block = 1;  ///< threads
  int shared_bytes = 0;
  unsigned grid_y = 1, grid_z = 1;
};

/// What a block may have of the context's device, in bytes.
inline int most_shared_bytes([[maybe_unused]] Context& context) {
#if defined(TESSERA_FIBER)
  return fiber::most_shared_bytes();
#else
  int bytes = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                                    context.device().index);
  if (status != cudaSuccess)
    throw CudaError("cudaDeviceGetAttribute: {}", cudaGetErrorString(status));
  return bytes;
#endif
}

/// How many blocks, or groups of blocks, the context's device runs side by side.
inline int processors([[maybe_unused]] Context& context) {
#if defined(TESSERA_FIBER)
  return fiber::processors();
#else
  int count = 0;
  const cudaError_t status =
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, context.device().index);
  if (status != cudaSuccess)
    throw CudaError("cudaDeviceGetAttribute: {}", cudaGetErrorString(status));
  return count;
#endif
}

/// Starts a kernel on the context's stream.
/// @throws Unsupported if a block needs more shared memory than the device has, CudaError naming
/// the kernel and the shape if the device refuses it
template <typename... Params, typename... Args>
void launch(Context& context, const char* name, void (*kernel)(Params...), const LaunchShape& shape,
            Args&&... args) {
#if defined(TESSERA_FIBER)
  require<Unsupported>(
      shape.shared_bytes <= most_shared_bytes(context),
      "{}: a block needs {} bytes of shared memory, more than the {} that there are", name,
      shape.shared_bytes, most_shared_bytes(context));
  fiber::run_grid(name, {shape.grid, shape.grid_y, shape.grid_z}, {shape.block, 1, 1},
                  static_cast<std::size_t>(shape.shared_bytes),
                  [kernel, ... params = Params(std::forward<Args>(args))] { kernel(params...); });
#else
  constexpr int kDefaultShared = 48 * 1024;  // more must be asked for
  cudaError_t status = cudaSuccess;
  if (shape.shared_bytes > kDefaultShared) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  shape.shared_bytes);
    if (status == cudaErrorInvalidValue) {
      cudaGetLastError();
      throw Unsupported("{}: a block needs {} bytes of shared memory, more than the {} of this GPU",
                        name, shape.shared_bytes, most_shared_bytes(context));
    }
  }
  if (status == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(shape.grid, shape.grid_y, shape.grid_z);
    config.blockDim = dim3(shape.block);
    config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
    config.stream = static_cast<cudaStream_t>(context.backend().stream());
    status = cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...);
  }
  if (status != cudaSuccess) {
    cudaGetLastError();  // so that the next call does not report it again
    throw CudaError("{}: {} x {} x {} blocks of {} threads with {} bytes of shared memory: {}",
                    name, shape.grid, shape.grid_y, shape.grid_z, shape.block, shape.shared_bytes,
                    cudaGetErrorString(status));
  }
#endif
}

}  // namespace tessera::kernels::cuda
