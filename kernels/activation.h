#pragma once

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

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

/// Activation of a gated linear unit: SiLU(x) = x / (1 + e^(-x)), or GELU in its tanh form.
enum class GatedKind { SwiGlu, GeGlu };

/// y = act(gate) * up, rounded once.
///
/// gate, up, y  [R, H], f64, f32 or bf16; the last dim is contiguous, rows may be strided, so that
///              gate and up can be the halves of one [R, 2 H] tensor
/// Source: Shazeer 2020, arXiv:2002.05202, eq. 5.
struct GatedForward {
  TensorView gate, up, y;
  GatedKind kind = GatedKind::SwiGlu;
};
void gated_forward(Context& context, const GatedForward& args);

/// Gradients have the shape and dtype of gate; their rows may be strided.
struct GatedBackward {
  TensorView gate, up, grad_y;
  GradientView grad_gate, grad_up;
  GatedKind kind = GatedKind::SwiGlu;
};
void gated_backward(Context& context, const GatedBackward& args);

}  // namespace tessera::kernels
