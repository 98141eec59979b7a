#pragma once

#include <cstdint>

#include "core/base/context.h"
#include "core/base/tensor_view.h"

namespace tessera::kernels {

/// y[b, t] = token_weight[tokens[b, t]] + position_weight[first_position + t]
///
/// tokens           [B, T] i32, contiguous
/// token_weight     [V, C], f64, f32 or bf16
/// position_weight  [P, C], optional, same dtype
/// y                [B, T, C], contiguous
/// @throws InvalidArgument naming place and value of a token outside [0, V), or positions past P;
/// on CUDA, where nothing waits for tokens to be read, y is NaN where the token is outside
struct EmbeddingForward {
  TensorView tokens, token_weight;
  TensorView position_weight{};
  std::int64_t first_position = 0;
  TensorView y;
};
void embedding_forward(Context& context, const EmbeddingForward& args);

/// grad_token_weight [V, C], grad_position_weight [P, C]: accumulator dtype. Without accumulate all
/// rows are written (zeros where no token points). Sums in an order that the tokens alone fix:
/// deterministic. Refuses tokens as above; on CUDA those outside [0, V) take no part.
struct EmbeddingBackward {
  TensorView tokens, grad_y;
  GradientView grad_token_weight, grad_position_weight;
  std::int64_t first_position = 0;
};
void embedding_backward(Context& context, const EmbeddingBackward& args);

}  // namespace tessera::kernels
