#pragma once

#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// Target of a row to ignore: its loss and its gradient are 0.
inline constexpr std::int32_t kIgnoreTarget = -1;

/// Softmax cross-entropy of a block of rows, optionally overwriting logits with their gradient.
///
/// logits   [R, V], f64, f32 or bf16, rows may be strided; if write_gradient, overwritten by the
///          gradient of grad_scale * losses
/// targets  [R] i32 in [0, V) or kIgnoreTarget
/// losses   [R] accumulator dtype: -log softmax(c)[target] in nats, where c is the logits, or with a
///          softcap above 0, softcap * tanh(logits / softcap); Gemma Team 2024, arXiv:2408.00118
/// On CUDA a target outside the vocabulary makes loss and gradient of its row NaN, because a check
/// on the host would have to wait for the device.
/// Source of the online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867.
struct CrossEntropy {
  TensorView logits;
  TensorView targets;
  TensorView losses;
  bool write_gradient = false;
  double grad_scale = 1.0;
  double softcap = 0.0;
};
void cross_entropy(Context& context, const CrossEntropy& args);

}  // namespace tessera::kernels
