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

/// Root-mean-square norm over the last dim: y = (offset + weight) * x / sqrt(mean(x^2) + eps).
///
/// @param x       [..., C], f64, f32 or bf16, contiguous
/// @param weight  [C], dtype of x; undefined: y = x / sqrt(mean(x^2) + eps)
/// @param eps     dimensionless, > 0
/// @param offset  1 for weights around 0, as Gemma's; not rounded to the dtype of x
/// @return        shape and dtype of x; accumulates in f32 (f64 for f64)
/// @grad          x, weight; keeps x and rstd
/// @throws InvalidArgument on a shape, dtype or context that does not fit
/// Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset = 0.0);

struct SumAndNorm {
  Tensor sum, y;
};

/// sum = x + residual and y = layer_norm(sum) in one pass over memory; the same values, bit for bit
/// on the CPU, as ops::add followed by layer_norm.
///
/// @param residual  shape and dtype of x, contiguous
/// @grad            x, residual, weight, bias; keeps sum, mean and rstd
/// @throws InvalidArgument on a shape, dtype or context that does not fit
SumAndNorm add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                          const Tensor& bias, double eps);

/// sum = x + residual and y = rms_norm(sum); otherwise as add_layer_norm.
SumAndNorm add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                        double offset = 0.0);

}  // namespace tessera::ops
