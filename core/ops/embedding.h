#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// y[b, t] = token_weight[tokens[b, t]] + position_weight[first_position + t].
///
/// @param tokens           [B, T] i32
/// @param token_weight     [V, C], f64, f32 or bf16
/// @param position_weight  [P, C], dtype of token_weight, or undefined
/// @param first_position   position of column 0; first_position + T <= P
/// @return                 [B, T, C], dtype of token_weight
/// @grad                   token_weight, position_weight; keeps tokens
/// @throws InvalidArgument also for a token outside the vocabulary; on a GPU that gives NaN instead
Tensor embedding(const Tensor& tokens, const Tensor& token_weight, const Tensor& position_weight,
                 std::int64_t first_position = 0);

}  // namespace tessera::ops
