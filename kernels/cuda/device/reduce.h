#pragma once

#include "kernels/cuda/device/shared.h"

namespace tessera::kernels::cuda {

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
/// Propagates NaN from either side.
struct Maximum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};

/// combine() over all lanes of a full warp; all lanes get the same bits.
template <typename T, typename Combine>
__device__ __forceinline__ T warp_reduce(T value, Combine combine) {
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, lanes));
  return value;
}

/// The same over a block of whole warps; all threads get the result. `scratch` has an element per
/// warp. A barrier precedes the writes to it, so that it can be reused at once.
template <typename T, typename Combine>
__device__ __forceinline__ T block_reduce(T value, const SharedArray<T>& scratch, T neutral,
                                          Combine combine) {
  const int thread = static_cast<int>(threadIdx.x);
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  value = warp_reduce(value, combine);
  __syncthreads();
  if (thread % kWarpSize == 0) scratch[thread / kWarpSize] = value;
  __syncthreads();
  const int lane = thread % kWarpSize;
  return warp_reduce(lane < warps ? static_cast<T>(scratch[lane]) : neutral, combine);
}

}  // namespace tessera::kernels::cuda
