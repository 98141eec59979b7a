#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// Layer norm over the last dim: y = weight * (x - mean) / sqrt(var + eps) + bias.
///
/// @param x       [..., C], f64, f32 or bf16, contiguous
/// @param weight  [C], dtype of x
/// @param bias    [C], dtype of x
/// @param eps     dimensionless, > 0
/// @return        shape and dtype of x; accumulates in f32 (f64 for f64)
/// @grad          x, weight, bias; keeps x, mean and rstd
/// @throws InvalidArgument on a shape, dtype or context that does not fit
/// Source: Ba et al. 2016, arXiv:1607.06450, eq. 4.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps);

}  // namespace tessera::ops
