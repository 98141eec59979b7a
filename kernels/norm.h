#pragma once

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// Layer norm over the last dim: y = weight * (x - mean) * rstd + bias, rstd = 1 / sqrt(var + eps).
///
/// x, y         [N, C], f64, f32 or bf16, contiguous
/// weight, bias [C], dtype of x
/// mean, rstd   [N], accumulator dtype; optional, needed by backward
/// residual     [N, C], dtype of x, optional: normalizes sum = x + residual, rounded to the dtype,
///              as `add` followed by the norm would
/// sum          [N, C], dtype of x; undefined without a residual. May be x or residual.
/// The variance is biased (divided by C) and computed around the mean.
struct LayerNormForward {
  TensorView x, weight, bias, y;
  TensorView mean{}, rstd{};
  double eps = 1e-5;
  TensorView residual{}, sum{};
};
void layer_norm_forward(Context& context, const LayerNormForward& args);

/// grad_x has x's dtype; grad_weight and grad_bias [C] have the accumulator dtype.
/// Sums over rows have a fixed order, on the CPU for any number of threads.
/// After a forward with a residual, x is the sum.
struct LayerNormBackward {
  TensorView x, weight, mean, rstd, grad_y;
  GradientView grad_x, grad_weight, grad_bias;
};
void layer_norm_backward(Context& context, const LayerNormBackward& args);

/// Root-mean-square norm over the last dim: y = weight * x * rstd, rstd = 1 / sqrt(mean(x^2) +
/// eps). Shapes, dtypes, residual and sum as above. Source: Zhang and Sennrich 2019,
/// arXiv:1910.07467, eq. 4.
struct RmsNormForward {
  TensorView x, weight, y;
  TensorView rstd{};
  double eps = 1e-5;
  TensorView residual{}, sum{};
};
void rms_norm_forward(Context& context, const RmsNormForward& args);

struct RmsNormBackward {
  TensorView x, weight, rstd, grad_y;
  GradientView grad_x, grad_weight;
};
void rms_norm_backward(Context& context, const RmsNormBackward& args);

}  // namespace tessera::kernels
