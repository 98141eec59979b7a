#pragma once

#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// y[b, t] = token_weight[tokens[b, t]] + position_weight[first_position + t]
///
/// tokens           [B, T] i32, contiguous
/// token_weight     [V, C], f64, f32 or bf16
/// position_weight  [P, C], optional, same dtype
/// y                [B, T, C], contiguous
/// On CUDA a token outside [0, V) makes its row of y NaN, because a check on the host would have to
/// wait for the device.
struct EmbeddingForward {
  TensorView tokens, token_weight;
  TensorView position_weight{};
  std::int64_t first_position = 0;
  TensorView y;
};
void embedding_forward(Context& context, const EmbeddingForward& args);

/// grad_token_weight [V, C], grad_position_weight [P, C]: accumulator dtype. Without accumulate,
/// rows of unused tokens are set to zero. Deterministic: the order of sums depends on the tokens
/// only. Tokens outside [first_token, first_token + V) are skipped.
struct EmbeddingBackward {
  TensorView tokens, grad_y;
  GradientView grad_token_weight{}, grad_position_weight{};
  std::int64_t first_position = 0;
  std::int64_t first_token = 0;  ///< of grad_token_weight
};
void embedding_backward(Context& context, const EmbeddingBackward& args);

/// The gradient of token_weight [vocab_size, C] as rows of distinct tokens, in any order, with the bits
/// of embedding_backward. Deterministic.
///
/// rows  [n, C], accumulator dtype, n >= B * T
/// ids   [n] i32: token of each row; -1: the row is unused, and its contents are undefined
struct EmbeddingBackwardRows {
  TensorView tokens, grad_y;
  std::int64_t vocab_size = 0;
  TensorView rows, ids;
};
void embedding_backward_rows(Context& context, const EmbeddingBackwardRows& args);

}  // namespace tessera::kernels
