#pragma once

#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// Operation after a matrix product, in the same kernel where the device supports it.
enum class Epilogue : std::uint8_t {
  None,
  Gelu,          ///< pre = product [+ bias], c = gelu(pre)
  GeluGradient,  ///< c = product * gelu'(pre): gradient of pre from that of gelu(pre)
};

/// c = op(a) op(b) [+ bias] [+ c or residual].
///
/// a  [M, K], or [K, M] if transpose_a; b  [K, N], or [N, K] if transpose_b; c  [M, N].
/// Rows may be strided (a leading dimension); the last dim is contiguous.
/// a and b share a dtype, f64, f32 or bf16; c has that dtype or the accumulator's (f32 for bf16).
/// bias  [N], dtype of a, optional: added to every row. Accumulates in f32 (f64 for f64).
/// residual  [M, N], dtype of c, optional, other memory than c; not with accumulate or an epilogue.
/// With K = 0 the product is zero.
///
/// The epilogue gives the same bits as a second call would, but on CUDA in bf16, where a fused kernel
/// applies GELU to the f32 accumulator, before rounding.
/// Gelu, GeluGradient: c is contiguous, has the dtype of a, and does not accumulate; no bias in
/// GeluGradient.
struct Matmul {
  TensorView a, b, c;
  bool transpose_a = false, transpose_b = false;
  bool accumulate = false;
  TensorView bias{};
  Epilogue epilogue = Epilogue::None;
  TensorView pre{};  ///< [M, N], contiguous, dtype of a; optional in Gelu
  TensorView residual{};
};
/// @throws Unsupported if the device has no kernel for the arguments
void matmul(Context& context, const Matmul& args);

/// A matrix product with an epilogue. The device sets `done` if it ran both in a fused kernel.
struct FusedMatmul {
  const Matmul& product;
  bool& done;
};

}  // namespace tessera::kernels
