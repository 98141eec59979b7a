#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// Causal self-attention of a packed projection; softmax scale 1 / sqrt(D).
///
/// @param qkv     [B, T, 3 * H * D]: queries, keys and values of all heads side by side, contiguous
/// @param n_head  H; divides the width
/// @return        [B, T, H * D], dtype of qkv; accumulates in f32 (f64 for f64)
/// @grad          qkv; keeps qkv, the result and the log-sum-exp [B, H, T]
Tensor causal_attention(const Tensor& qkv, std::int64_t n_head);

/// One step of decoding: attends from new tokens to a cache and the new tokens themselves. Writes
/// the new keys and values into the cache. Not differentiable.
///
/// @param qkv      [B, T, 3 * H * D] of the new tokens
/// @param n_head   H
/// @param cache_k  [B, P, H, D], dtype of qkv; positions [0, past) are filled
/// @param cache_v  like cache_k
/// @param past     number of filled positions; past + T <= P
/// @return         [B, T, H * D]
/// @throws Unsupported while recording, if qkv requires a gradient: decode under NoGradGuard
Tensor cached_attention(const Tensor& qkv, std::int64_t n_head, const Tensor& cache_k,
                        const Tensor& cache_v, std::int64_t past);

}  // namespace tessera::ops
