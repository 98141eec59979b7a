#pragma once

// The language of the kernels: CUDA C++, or plain C++ in builds that run them as fibers on the host
// (TESSERA_FIBER). Kernels include this and device/ headers only, use no static __shared__ memory,
// and are started through kernels/cuda/launch.h; so each file means the same to both compilers.

#if defined(TESSERA_FIBER)
#include <cuda_language.h>  // of tests/support/fiber
#elif defined(__CUDACC__) || defined(TESSERA_CUDA_HOST)
#include <cuda_runtime.h>
#else
#error "kernels are compiled by nvcc, or with TESSERA_FIBER; host code, TESSERA_CUDA_HOST"
#endif

namespace tessera::kernels::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;

}  // namespace tessera::kernels::cuda
