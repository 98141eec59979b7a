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

/// product.c = gelu(pre), where pre = op(a) op(b) [+ bias]: a linear layer and its activation, GELU
/// in its tanh form (activation.h).
///
/// product  as Matmul; c is contiguous, has the dtype of a and is not accumulated on
/// pre      [M, N], contiguous, dtype of a, optional: what backward needs. Must not overlap c.
///
/// Where the device has no kernel that does it at once, it is a matmul and a gelu_forward, bit for
/// bit. Where it has (bf16 on CUDA), GELU is applied to the accumulator, not to its rounded value
/// in pre: c may differ by that rounding, also between calls with and without pre.
struct MatmulGelu {
  Matmul product;
  TensorView pre{};
};
/// @throws InvalidArgument on shapes, strides or dtypes that don't fit, Unsupported as matmul
void matmul_gelu(Context& context, const MatmulGelu& args);

/// product.c = (op(a) op(b)) * gelu'(pre): the gradient of pre in y = op(gelu(pre)).
///
/// product  as Matmul, without bias; c is contiguous, has the dtype of a and is not accumulated on
/// pre      [M, N], contiguous, dtype of a. Must not overlap c.
///
/// Composed (matmul, then gelu_backward in place) and rounded as above: at once, the product is not
/// rounded before it is multiplied.
struct MatmulGeluBackward {
  Matmul product;
  TensorView pre;
};
/// @throws InvalidArgument on shapes, strides or dtypes that don't fit, Unsupported as matmul
void matmul_gelu_backward(Context& context, const MatmulGeluBackward& args);

/// The gradients of a linear layer's weight and bias: product, and bias [+]= the sum over k of what
/// is multiplied with the layer's input, that is over the rows of the gradient of its output.
///
/// product     as Matmul, without bias
/// of_a        the gradient is a, transposed: [K, M]; else it is b, not transposed: [K, N]
/// bias        [M] of a, [N] of b, contiguous, in the accumulator's dtype
///
/// Where the device has no kernel that does it at once, it is a matmul and a sum_rows, bit for bit.
struct MatmulBiasGradient {
  Matmul product;
  bool of_a = false;
  GradientView bias{};
  const TensorView& gradient() const { return of_a ? product.a : product.b; }
};
/// @throws InvalidArgument on shapes or dtypes that don't fit, Unsupported as matmul
void matmul_bias_gradient(Context& context, const MatmulBiasGradient& args);

}  // namespace tessera::kernels
