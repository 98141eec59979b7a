#pragma once

#include <cstdint>

#include "core/base/rng.h"
#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// Draws a token from each row of logits.
///
/// logits  [B, V] f32, rows may be strided; V <= kMostSampledColumns
/// tokens  [B] i32, contiguous
///
/// Top-k keeps the top_k most likely tokens; top-p then keeps the fewest most likely of these whose
/// weights sum to at least top_p of the total; ties go to the lower id. Min-p then keeps those with
/// at least min_p of the weight of the most likely token. Weights are e^((logit -
/// largest) / temperature) as integers (kernels/sampling_weight.h): sums are exact, so that every
/// device draws the same token. Row b draws with random word first_draw + b of `key`: the result is
/// the first token, by id, at which the running sum of kept weights exceeds word / 2^32 of their
/// total. Temperature 0 selects the most likely token.
/// @throws InvalidArgument on the CPU, naming the row, if a logit is NaN or the largest one is not
/// finite; on CUDA the row's token is -1 instead
struct Sampling {
  TensorView logits;
  TensorView tokens;
  double temperature = 1.0;
  std::int64_t top_k = 0;  ///< 0: all
  double top_p = 1.0;      ///< in (0, 1]
  double min_p = 0.0;      ///< in [0, 1]
  RngKey key;
  std::uint64_t first_draw = 0;
};
void sample(Context& context, const Sampling& args);

/// Maximum number of columns, so that the sum of weights, each at most 2^40, stays below 2^63.
inline constexpr std::int64_t kMostSampledColumns = std::int64_t{1} << 22;

}  // namespace tessera::kernels
