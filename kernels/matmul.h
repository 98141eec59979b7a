#pragma once

#include "core/base/context.h"
#include "core/base/tensor_view.h"

namespace tessera::kernels {

/// c = op(a) op(b) [+ bias] [+ c], the product that every linear layer is made of.
///
/// a  [M, K], or [K, M] if transpose_a; b  [K, N], or [N, K] if transpose_b; c  [M, N].
/// Rows may be strided (a leading dimension); the last dim is contiguous.
/// a and b share a dtype, f64, f32 or bf16; c has that dtype or the accumulator's (f32 for bf16).
/// bias  [N], dtype of a, optional: added to every row. Accumulates in f32 (f64 for f64).
/// With K = 0 the product is zero.
struct Matmul {
  TensorView a;
  TensorView b;
  TensorView c;
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  TensorView bias{};
};
/// @throws InvalidArgument on shapes or dtypes that don't fit, Unsupported on the device
void matmul(Context& context, const Matmul& args);

}  // namespace tessera::kernels
