#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace tessera::ops {

// Rearranged elements, as dense copies; see view.h for reshape, which shares storage. Dims may be
// negative: -1 is the last.
//
// @param x  f64, f32, bf16, i32 or i64, any strides
// @return   dense, dtype of x
// @grad     x; keeps nothing
// @throws InvalidArgument on a dim, size, dtype or context that does not fit

/// x with two dims exchanged.
Tensor transpose(const Tensor& x, int dim0, int dim1);

/// x repeated along new dims in front and dims of size 1, as NumPy broadcasts.
Tensor broadcast_to(const Tensor& x, const Shape& shape);

/// Elements [begin, end) of a dim.
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end);

/// Slices of consecutive elements of a dim. @param sizes  of the slices; they add up to that of dim
std::vector<Tensor> split(const Tensor& x, const std::vector<std::int64_t>& sizes, int dim);

/// Tensors joined along a dim; they agree in dtype and in all other sizes.
Tensor concat(const std::vector<Tensor>& tensors, int dim);

/// y[i, j, k] = x[i, index[i, j, k], k], for dim 1 of three dims.
///
/// @param x      f64, f32 or bf16, any strides
/// @param index  i32, contiguous, in [0, size of dim); as many dims as x, of at most its sizes except
///   for dim
/// @return       shape of index
/// @grad         x, summed over equal indices; keeps index
/// @throws InvalidArgument also on an index out of range, with its place and value; on a GPU such an
///   index gives NaN instead
Tensor gather(const Tensor& x, int dim, const Tensor& index);

}  // namespace tessera::ops
