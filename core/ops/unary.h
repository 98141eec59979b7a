#pragma once

#include "core/tensor.h"

namespace tessera::ops {

// Elementwise functions of one tensor; see activation.h for gelu.
//
// @param x  f64, f32 or bf16, any strides
// @return   dense, shape and dtype of x; computes in f32 (f64 for f64)
// @throws InvalidArgument on another dtype

/// max(x, 0). @grad x, 0 at 0; keeps the result
Tensor relu(const Tensor& x);
/// 1 / (1 + e^(-x)). @grad x; keeps the result
Tensor sigmoid(const Tensor& x);
/// x / (1 + e^(-x)). @grad x; keeps x
Tensor silu(const Tensor& x);
/// @grad x; keeps the result
Tensor tanh(const Tensor& x);
/// @grad x; keeps the result
Tensor exp(const Tensor& x);
/// Natural logarithm. @grad x; keeps x
Tensor log(const Tensor& x);
/// @grad x, infinite at 0; keeps the result
Tensor sqrt(const Tensor& x);

}  // namespace tessera::ops
