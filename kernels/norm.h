#pragma once

#include "core/base/context.h"
#include "core/base/tensor_view.h"

namespace tessera::kernels {

/// Layer norm over the last dim: y = weight * (x - mean) * rstd + bias, rstd = 1 / sqrt(var + eps).
///
/// x, y         [N, C], f64, f32 or bf16, contiguous
/// weight, bias [C], dtype of x
/// mean, rstd   [N], accumulator dtype; may be undefined when no backward follows
/// The variance is biased (divided by C) and computed around the mean.
struct LayerNormForward {
  TensorView x, weight, bias, y;
  TensorView mean{}, rstd{};
  double eps = 1e-5;
};
void layer_norm_forward(Context& context, const LayerNormForward& args);

/// grad_x has x's dtype; grad_weight and grad_bias [C] have the accumulator dtype.
/// The sums over rows are taken in a fixed order for a given number of threads.
struct LayerNormBackward {
  TensorView x, weight, mean, rstd, grad_y;
  GradientView grad_x, grad_weight, grad_bias;
};
void layer_norm_backward(Context& context, const LayerNormBackward& args);

}  // namespace tessera::kernels
