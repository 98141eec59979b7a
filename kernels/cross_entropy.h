#pragma once

#include <cstdint>

#include "core/base/context.h"
#include "core/base/tensor_view.h"

namespace tessera::kernels {

/// A row with this target takes no part: loss 0, gradient 0.
inline constexpr std::int32_t kIgnoreTarget = -1;

/// Softmax cross-entropy of a block of rows, optionally turning logits into their gradient.
///
/// logits   [R, V], f64, f32 or bf16, rows may be strided; with write_gradient overwritten by
///          grad_scale * (softmax(logits) - onehot(target))
/// targets  [R] i32 in [0, V) or kIgnoreTarget
/// losses   [R] accumulator dtype: -log softmax(logits)[target] in nats
/// @throws InvalidArgument naming row and value for a target outside the vocabulary; on CUDA, where
/// nothing waits for targets to be read, loss and gradient of that row are NaN instead
/// Source of the online form: Milakov and Gimelshein 2018, arXiv:1805.02867.
struct CrossEntropy {
  TensorView logits;
  TensorView targets;
  TensorView losses;
  bool write_gradient = false;
  double grad_scale = 1.0;
};
void cross_entropy(Context& context, const CrossEntropy& args);

}  // namespace tessera::kernels
