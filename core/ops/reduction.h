#pragma once

#include "core/tensor.h"

namespace tessera::ops {

// Reductions over all elements, with a result of shape [], or over one dim, which the result lacks,
// or has with size 1 if keepdim. Dims may be negative: -1 is the last.
//
// @param x  f64, f32 or bf16
// @return   dense, dtype of x unless stated
// @throws InvalidArgument on a dim or dtype that does not fit

/// Sum; partial sums in f32 (f64 for f64) are added up in f64, in an order that depends on the
/// shape only. 0 for no elements. x of any strides. @grad x; keeps nothing
Tensor sum(const Tensor& x);
Tensor sum(const Tensor& x, int dim, bool keepdim = false);

/// sum / number of elements; NaN for none. @grad x; keeps nothing
Tensor mean(const Tensor& x);
Tensor mean(const Tensor& x, int dim, bool keepdim = false);

/// Largest element, NaN if there is one. x contiguous. @grad the first of the largest elements of x;
/// keeps their places. @throws InvalidArgument if there is no element
Tensor max(const Tensor& x);
Tensor max(const Tensor& x, int dim, bool keepdim = false);

/// Place of the first of the largest elements, i32: along the dim, or row-major among all elements.
/// x contiguous. No gradient. @throws InvalidArgument if there is no element
Tensor argmax(const Tensor& x);
Tensor argmax(const Tensor& x, int dim, bool keepdim = false);

}  // namespace tessera::ops
