#pragma once

#include <array>
#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// Angles by which the pairs of a head rotate from one position to the next.
struct RotaryAngles {
  static constexpr int kMostPairs = 256;
  int pairs = 0;                          ///< R / 2
  double factor = 1.0;                    ///< of rotated numbers
  std::array<double, kMostPairs> step{};  ///< radians per position; the first `pairs` are used
};

/// Rotary position embedding: rotates the pair (x[i], x[i + R/2]) of every head by the angle
/// position * step[i], where position is first_position + t, and multiplies it by the factor.
/// Numbers from R on are copied. Backward rotates gradients by the negative angle (`inverse`).
///
/// x  [B, T, H, D], f64, f32 or bf16, any strides, the last dim contiguous, D at least R; H may
///    span the query and key heads of one packed buffer
/// y  shape and dtype of x, any strides, the last dim contiguous; either x itself or no overlap
/// Angles are reduced in f64, so that for f32 and bf16 their error is below 1e-6 at any position
/// below 2^31.
/// Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2; pairs as in Hugging Face's Llama.
struct Rotary {
  TensorView x;
  GradientView y;
  RotaryAngles angles;
  std::int64_t first_position = 0;
  bool inverse = false;
  std::int64_t copied_heads = 0;  ///< number of last heads (values) to copy without rotation
};
void rotary(Context& context, const Rotary& args);

}  // namespace tessera::kernels
