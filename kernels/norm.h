#pragma once

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// Layer norm over the last dim: y = weight * (x - mean) * rstd + bias, rstd = 1 / sqrt(var + eps).
/// Root-mean-square norm: y = weight * x * rstd, rstd = 1 / sqrt(mean(x^2) + eps); Zhang and
/// Sennrich 2019, arXiv:1910.07467, eq. 4.
///
/// x, y         [N, C], f64, f32 or bf16, contiguous
/// weight, bias [C], dtype of x; RMS norm has no bias
/// mean, rstd   [N], accumulator dtype; optional, needed by backward; RMS norm has no mean
/// residual     [N, C], dtype of x, optional: the norm is then that of sum = x + residual, rounded
///              to the dtype; bitwise equal to `add` followed by the norm
/// offset       added to the weight, in the accumulator dtype: 1 for weights around 0
/// sum          [N, C], dtype of x; not set without a residual. May be x or residual.
/// The variance is biased (divided by C) and computed around the mean.
struct NormForward {
  TensorView x, weight;
  TensorView bias{};
  TensorView y;
  TensorView mean{}, rstd{};
  double eps = 1e-5;
  TensorView residual{}, sum{};
  double offset = 0.0;
};
void layer_norm_forward(Context& context, const NormForward& args);
void rms_norm_forward(Context& context, const NormForward& args);

/// grad_x has x's dtype; grad_weight and grad_bias [C] have the accumulator dtype. So has grad_x_sums [C], optional:
/// the sums of grad_x over the rows, with what it accumulates, before or after it is rounded; needs grad_x.
/// For a layer that computed x, they are the gradient of its bias.
/// Sums over rows have a fixed order, which on the CPU does not depend on the number of threads.
/// After a forward with a residual, x here is its `sum`.
struct NormBackward {
  TensorView x, weight;
  TensorView mean{};
  TensorView rstd, grad_y;
  GradientView grad_x, grad_weight;
  GradientView grad_bias{};
  double offset = 0.0;
  GradientView grad_x_sums{};
};
void layer_norm_backward(Context& context, const NormBackward& args);
void rms_norm_backward(Context& context, const NormBackward& args);

}  // namespace tessera::kernels
