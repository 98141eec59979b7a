#pragma once

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// y = e^(x - max) / sum of e^(x - max) over each row; the logarithm of it if `log`.
/// x, y  [R, C], f64, f32 or bf16, contiguous, C >= 1. Computes in f32 (f64 for f64). -inf gives 0;
/// a row without a finite element, or with +inf, gives NaN.
struct SoftmaxForward {
  TensorView x, y;
  bool log = false;
};
void softmax_forward(Context& context, const SoftmaxForward& args);

/// grad_x = y (grad_y - sum of grad_y y), or grad_y - e^y sum of grad_y if `log`.
/// y is the result of forward; all of shape [R, C], of one dtype, contiguous.
struct SoftmaxBackward {
  TensorView y, grad_y;
  GradientView grad_x;
  bool log = false;
};
void softmax_backward(Context& context, const SoftmaxBackward& args);

}  // namespace tessera::kernels
