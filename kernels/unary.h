#pragma once

#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// A function of one element x and a scalar s.
enum class UnaryKind : std::uint8_t {
  Copy,          ///< x
  Multiply,      ///< x * s
  Divide,        ///< x / s
  Add,           ///< x + s
  SubtractFrom,  ///< s - x
  DivideInto,    ///< s / x
  Relu,
  Sigmoid,
  Silu,
  Tanh,
  Exp,
  Log,
  Sqrt,
};

/// y = kind(x), elementwise.
///
/// x, y  same shape and dtype, f64, f32 or bf16, any strides; computes in f32 (f64 for f64).
///       Copy also moves i32 and i64. y may be x itself.
/// y accumulates with Copy, Multiply and Divide only.
struct Unary {
  TensorView x;
  GradientView y;
  UnaryKind kind = UnaryKind::Copy;
  double scalar = 1.0;
};
void unary(Context& context, const Unary& args);

}  // namespace tessera::kernels
