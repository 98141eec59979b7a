#pragma once

#include <cstdint>
#include <span>

#include "core/base/rng.h"
#include "core/tensor.h"

namespace tessera::models {

struct SamplingOptions {
  double temperature = 1.0;  ///< 0: the most likely token
  std::int64_t top_k = 0;    ///< keep the k most likely; 0: all
  double top_p = 1.0;        ///< keep the fewest most likely whose probabilities reach p
  /// @throws InvalidArgument naming the value that does not fit
  void validate() const;
};

/// Draws a token: temperature, then top-k, then top-p, as Hugging Face orders them. Ties go to the
/// lower id. The same token on every device.
/// @param logits  [V], finite or -inf
/// @param key, draw  random stream and the number of this draw in it
/// @throws InvalidArgument if logits are empty, one is NaN, or the largest is not finite
std::int32_t sample(std::span<const float> logits, const SamplingOptions& options,
                    const RngKey& key, std::uint64_t draw);

/// Draws a token for each row on the logits' device; does not wait.
/// @param logits  [B, V], f32, contiguous
/// @param first_draw  number of the first row's draw; row i uses first_draw + i
/// @return        [B] i32; on CUDA -1 for a row without a valid distribution
/// @throws InvalidArgument as above, on the CPU
Tensor sample(const Tensor& logits, const SamplingOptions& options, const RngKey& key,
              std::uint64_t first_draw);

}  // namespace tessera::models
