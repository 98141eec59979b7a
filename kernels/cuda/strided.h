#pragma once

#include "kernels/cuda/elementwise.h"
#include "kernels/strided.h"

namespace tessera::kernels::cuda {

/// Offset of the loop's element i in view `view`.
__device__ __forceinline__ std::int64_t offset_of(const StridedLoop& loop, int view,
                                                  std::int64_t i) {
  std::int64_t offset = 0;
  for (int d = loop.dims - 1; d >= 0; --d) {
    const std::int64_t rest = i / loop.sizes[d];
    offset += (i - rest * loop.sizes[d]) * loop.strides[view][d];
    i = rest;
  }
  return offset;
}

}  // namespace tessera::kernels::cuda
