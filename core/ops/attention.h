#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// Heads, mask and scores of an attention operation. A query sees the keys that every given mask
/// allows.
struct AttentionOptions {
  std::int64_t heads = 0;     ///< H, heads of queries
  std::int64_t kv_heads = 0;  ///< Hkv, heads of keys and values; divides H; 0: H
  bool causal = true;         ///< no key after the query; false: full attention
  std::int64_t window = 0;    ///< causal alone: the last `window` keys up to the query; 0: all
  double softcap = 0.0;       ///< > 0: a scaled score s becomes softcap * tanh(s / softcap)
  double scale = 0.0;         ///< factor of the scores, rounded to f32; 0: 1 / sqrt(D)
  /// i32 [B, S], contiguous: the document of every key; keys of other documents are hidden.
  /// Undefined: one document. For sequences packed of several documents.
  Tensor documents{};
};

/// Self-attention of a packed projection. S (number of keys) is T.
///
/// @param qkv  [B, T, (H + 2 Hkv) * D]: heads of queries, keys and values side by side, f64, f32 or
///             bf16, contiguous
/// @return     [B, T, H * D], dtype of qkv; accumulates in f32 (f64 for f64)
/// @grad       qkv; keeps qkv, the documents, the result and the log-sum-exp [B, H, T]
/// @throws InvalidArgument on a shape, dtype or option that does not fit
/// Sources: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; Ainslie et al. 2023,
/// arXiv:2305.13245 (shared keys and values); Jiang et al. 2023, arXiv:2310.06825 (window); Gemma
/// Team 2024, arXiv:2408.00118 (softcap).
Tensor attention(const Tensor& qkv, const AttentionOptions& options);

/// The same for separate queries, keys and values, for example normed ones or cross-attention.
/// Query t stands at the position of key t + S - T.
///
/// @param q        [B, T, H, D], f64, f32 or bf16, contiguous
/// @param k        [B, S, Hkv, D], dtype of q, contiguous; S >= T if causal or with documents
/// @param v        like k
/// @param options  heads and kv_heads may be 0: those of q and k
/// @return         [B, T, H * D], dtype of q
/// @grad           q, k, v; keeps them, the documents, the result and the log-sum-exp [B, H, T]
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options = {});

/// One step of decoding: attends from new tokens to a cache and the new tokens themselves. Writes
/// the new keys and values into the cache. Not differentiable.
///
/// @param qkv      [B, T, (H + 2 Hkv) * D] of the new tokens
/// @param options  causal; documents are [B, past + T]
/// @param cache_k  [B, P, Hkv, D], dtype of qkv; positions [0, past) are filled
/// @param cache_v  like cache_k
/// @param past     number of filled positions; past + T <= P
/// @return         [B, T, H * D]
/// @throws Unsupported while recording, if an input requires a gradient: decode under NoGradGuard
Tensor cached_attention(const Tensor& qkv, const AttentionOptions& options, const Tensor& cache_k,
                        const Tensor& cache_v, std::int64_t past);

/// The same for separate queries [B, T, H, D], keys and values [B, T, Hkv, D] of the new tokens.
Tensor cached_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionOptions& options, const Tensor& cache_k,
                        const Tensor& cache_v, std::int64_t past);

}  // namespace tessera::ops
