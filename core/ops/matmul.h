#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// Matrix product over the last two dims, for each matrix of the leading dims, which broadcast as
/// NumPy's do.
///
/// @param a  [..., M, K], f64, f32 or bf16, contiguous
/// @param b  [..., K, N], dtype of a, contiguous
/// @return   [..., M, N], dtype of a; accumulates in f32 (f64 for f64)
/// @grad     a, b; keeps the factor of each input that requires a gradient
/// @throws InvalidArgument on a shape, dtype or context that does not fit
Tensor matmul(const Tensor& a, const Tensor& b);

}  // namespace tessera::ops
