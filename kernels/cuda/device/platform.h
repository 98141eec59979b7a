#pragma once

// CUDA C++, or plain C++ in builds that run kernels as fibers on the host (TESSERA_FIBER). For
// this, kernels use no static __shared__ memory and are launched through kernels/cuda/launch.h.

#if defined(TESSERA_FIBER)
#include <cuda_language.h>  // of tests/support/fiber
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#error "kernels are compiled by nvcc, or with TESSERA_FIBER"
#endif

namespace tessera::kernels::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;

}  // namespace tessera::kernels::cuda
