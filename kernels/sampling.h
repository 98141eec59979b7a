#pragma once

#include <cstdint>

#include "core/base/context.h"
#include "core/base/rng.h"
#include "core/base/tensor_view.h"

namespace tessera::kernels {

/// Draws a token from each row of logits.
///
/// logits  [B, V] f32, rows may be strided; V <= kMostSampledColumns
/// tokens  [B] i32, contiguous
///
/// A row keeps its top_k most likely tokens and of these, as top_p < 1 asks, the fewest most likely
/// whose weights reach top_p of their sum; ties go to the lower id. Weights are e^((logit -
/// largest) / temperature), as integers: see kernels/sampling_weight.h. Word number first_draw + b
/// of the stream is the random number of row b: the token is the first one, by id, at which the sum
/// of the weights kept exceeds word / 2^32 of their total. All sums are exact, so every device
/// draws the same token. With temperature 0 the most likely token is taken.
/// @throws InvalidArgument naming the row if a logit is NaN, or if the largest one is not finite;
/// on CUDA, where nothing waits for logits to be read, the row's token is -1 instead
struct Sampling {
  TensorView logits;
  TensorView tokens;
  double temperature = 1.0;
  std::int64_t top_k = 0;  ///< 0: all
  double top_p = 1.0;      ///< in (0, 1]
  RngKey key;
  std::uint64_t first_draw = 0;
};
void sample(Context& context, const Sampling& args);

/// So many weights cannot overflow the sum.
inline constexpr std::int64_t kMostSampledColumns = std::int64_t{1} << 22;

}  // namespace tessera::kernels
