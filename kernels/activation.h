#pragma once

#include "core/base/context.h"
#include "core/base/tensor_view.h"

namespace tessera::kernels {

/// GELU, tanh form: y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). x, y same shape and dtype,
/// contiguous. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
struct GeluForward {
  TensorView x, y;
};
void gelu_forward(Context& context, const GeluForward& args);

struct GeluBackward {
  TensorView x, grad_y;
  GradientView grad_x;
};
void gelu_backward(Context& context, const GeluBackward& args);

}  // namespace tessera::kernels
