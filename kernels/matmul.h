#pragma once

#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// Operation after a product, in the same kernel where the device supports it.
enum class Epilogue : std::uint8_t {
  None,
  Gelu,          ///< pre = the product [+ bias], c = gelu(pre)
  GeluGradient,  ///< c = the product * gelu'(pre): the gradient of pre in y = op(gelu(pre))
  BiasGradient,  ///< bias_gradient [+]= sums over the rows of the output's gradient
};

/// c = op(a) op(b) [+ bias] [+ c].
///
/// a  [M, K], or [K, M] if transpose_a; b  [K, N], or [N, K] if transpose_b; c  [M, N].
/// Rows may be strided (a leading dimension); the last dim is contiguous.
/// a and b share a dtype, f64, f32 or bf16; c has that dtype or the accumulator's (f32 for bf16).
/// bias  [N], dtype of a, optional: added to every row. Accumulates in f32 (f64 for f64).
/// With K = 0 the product is zero.
///
/// Without a fused kernel, epilogues run as separate kernels, with the same bits as these. Fused
/// (bf16 on CUDA), GELU reads the f32 accumulator instead of its rounded value.
/// Gelu, GeluGradient: c is contiguous, has the dtype of a, and does not accumulate; no bias in
/// GeluGradient.
/// BiasGradient: no bias. The gradient of the layer's output is b, or a if gradient_is_a; its rows
/// are the terms of the product (a transposed, b not).
struct Matmul {
  TensorView a, b, c;
  bool transpose_a = false, transpose_b = false;
  bool accumulate = false;
  TensorView bias{};
  Epilogue epilogue = Epilogue::None;
  TensorView pre{};              ///< [M, N], contiguous, dtype of a; optional in Gelu
  GradientView bias_gradient{};  ///< [columns of the gradient], in the accumulator dtype
  bool gradient_is_a = false;

  const TensorView& gradient() const { return gradient_is_a ? a : b; }
};
/// @throws Unsupported on the device
void matmul(Context& context, const Matmul& args);

/// A product with an epilogue, offered to a device; a fused kernel that runs it sets `done`.
struct FusedMatmul {
  const Matmul& product;
  bool& done;
};

}  // namespace tessera::kernels
