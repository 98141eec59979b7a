#pragma once

#include "core/tensor.h"

namespace tessera::ops {

// Conditions and masks are i32 tensors: all numbers but 0 are true. Shapes broadcast as NumPy's do.

/// a where the condition is true, else b.
///
/// @param condition  i32, any strides
/// @param a, b       f64, f32, bf16 or i32, of one dtype, any strides
/// @return           dense, of the broadcast shape of all three, dtype of a
/// @grad             a, b; keeps condition
/// @throws InvalidArgument on shapes that cannot be broadcast, a dtype or context that does not fit
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);

/// value where the mask is true, else x.
///
/// @param x     f64, f32, bf16 or i32, any strides
/// @param mask  i32, of a shape that broadcasts to that of x
/// @return      dense, shape and dtype of x
/// @grad        x; keeps mask
/// @throws InvalidArgument on a shape, dtype or context that does not fit
Tensor masked_fill(const Tensor& x, const Tensor& mask, double value);

// Comparisons of two tensors, or with a number, which is rounded to the dtype of a. NaN is equal to
// nothing, and neither less nor greater.
//
// @param a, b  f64, f32, bf16 or i32, of one dtype, any strides
// @return      i32, dense, of the broadcast shape: 1 where it holds, else 0. No gradient.
// @throws InvalidArgument on shapes that cannot be broadcast, a dtype or context that does not fit

Tensor equal(const Tensor& a, const Tensor& b);
Tensor not_equal(const Tensor& a, const Tensor& b);
Tensor less(const Tensor& a, const Tensor& b);
Tensor less_equal(const Tensor& a, const Tensor& b);
Tensor greater(const Tensor& a, const Tensor& b);
Tensor greater_equal(const Tensor& a, const Tensor& b);
Tensor equal(const Tensor& a, double b);
Tensor not_equal(const Tensor& a, double b);
Tensor less(const Tensor& a, double b);
Tensor less_equal(const Tensor& a, double b);
Tensor greater(const Tensor& a, double b);
Tensor greater_equal(const Tensor& a, double b);

}  // namespace tessera::ops
