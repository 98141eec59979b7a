#pragma once

#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// A function of two elements. Gradients: of a function's input, from the element `a` that the
/// function's backward keeps, and the gradient `b` of its result.
enum class BinaryKind : std::uint8_t {
  Add,
  Subtract,
  Multiply,
  Divide,
  ReluGradient,        ///< a > 0 ? b : 0; a is input or result
  SigmoidGradient,     ///< a (1 - a) b; a is the result
  SiluGradient,        ///< b silu'(a); a is the input
  TanhGradient,        ///< (1 - a^2) b; a is the result
  ReciprocalGradient,  ///< b / a^2; a is the input
};

/// y = scale * kind(a, b) (+= if y.accumulate), elementwise.
///
/// a, b, y  same shape and dtype, f64, f32 or bf16, any strides; 0 repeats an element. Computes in
///          f32 (f64 for f64). y may be a or b itself.
struct Binary {
  TensorView a, b;
  GradientView y;
  BinaryKind kind = BinaryKind::Add;
  double scale = 1.0;
};
void binary(Context& context, const Binary& args);

}  // namespace tessera::kernels
