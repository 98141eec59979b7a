#pragma once

#include <cstdint>

#include "core/base/context.h"
#include "core/base/tensor_view.h"

namespace tessera::kernels {

/// Rotary position embedding: rotates the pair (x[i], x[i + D/2]) of every head by the angle
/// position * base^(-2 i / D), where position is first_position + t. Its own backward: with
/// `inverse`, by the negative angle.
///
/// x  [B, T, H, D], f64, f32 or bf16, any strides, the last dim contiguous, D even; the heads of
///    queries and keys may lie side by side in one packed buffer, in any number
/// y  shape and dtype of x, strides free likewise; may be x itself, else no overlap
/// Angles are reduced in f64: their error is below 1e-6 at any position below 2^31 (f32 and bf16).
/// Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2; pairs as in Hugging Face's Llama.
struct Rotary {
  TensorView x;
  GradientView y;
  std::int64_t first_position = 0;
  double base = 10000.0;  ///< 1 or more
  bool inverse = false;
  std::int64_t copied_heads = 0;  ///< so many at the end go to y as they are: values, say
};
void rotary(Context& context, const Rotary& args);

}  // namespace tessera::kernels
