#pragma once

#include <cstdint>
#include <span>

#include "core/base/rng.h"
#include "core/tensor.h"

namespace tessera::models {

struct SamplingOptions {
  double temperature = 1.0;  ///< 0: the most likely token
  std::int64_t top_k = 0;    ///< keep the k most likely; 0: all
  double top_p = 1.0;        ///< keep the fewest most likely whose probabilities sum to p or more
  double min_p = 0.0;  ///< keep those with p times the probability of the most likely, or more
  double repetition_penalty = 1.0;  ///< see penalize_repetition(); not of sample()
  /// @throws InvalidArgument naming the value that does not fit
  void validate() const;
};

/// Draws a token for each row, on the logits' device and without waiting for it. Temperature comes
/// first, then top-k, then top-p, then min-p. Ties go to the lower id. Every device draws the same
/// tokens.
/// @param logits  [B, V], f32, contiguous; finite or -inf
/// @param key     random stream
/// @param first_draw  number of the first row's draw in `key`; row i uses first_draw + i
/// @return        [B] i32; on CUDA -1 for a row without a valid distribution
/// @throws InvalidArgument if logits are empty; on the CPU also if one is NaN, or the largest of a
///   row is not finite
Tensor sample(const Tensor& logits, const SamplingOptions& options, const RngKey& key,
              std::uint64_t first_draw);

/// Divides the positive logits of tokens that occur in `tokens` by the penalty, and multiplies the
/// others by it. On a GPU through host memory.
/// @param logits   [1, V], f32, contiguous
/// @param penalty  1: none, above 1: fewer repetitions
/// @return         [1, V]
/// Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1, as transformers has it.
Tensor penalize_repetition(const Tensor& logits, std::span<const std::int32_t> tokens,
                           double penalty);

}  // namespace tessera::models
