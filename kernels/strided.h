#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/base/tensor_view.h"

namespace tessera::kernels {

/// A row-major loop over the elements of up to four views of one shape, with any strides. Dims of
/// size 1 are left out; adjacent dims are merged where the strides of all views allow it, so that
/// the loop over dense views has one dim.
struct StridedLoop {
  static constexpr int kMostViews = 4;

  int dims = 1;
  std::int64_t rows = 1;  ///< product of all sizes but the last
  std::int64_t sizes[Dims::kMaxDims] = {};
  std::int64_t strides[kMostViews][Dims::kMaxDims] = {};

  std::int64_t width() const { return sizes[dims - 1]; }
  std::int64_t stride(int view) const { return strides[view][dims - 1]; }
  std::int64_t count() const { return rows * width(); }
};

StridedLoop strided_loop(std::initializer_list<const TensorView*> views);

/// A view with the strides of `view`, and 0 along new or repeated dims: NumPy's broadcasting.
/// @param shape  sizes of view, aligned at the last dim, are those of shape or 1
TensorView broadcast(const TensorView& view, const Shape& shape);

/// The view of element 0 along `dim`, of size 1.
TensorView first_along(const TensorView& view, int dim);

}  // namespace tessera::kernels
