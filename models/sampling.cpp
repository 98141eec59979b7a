#include "models/sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/sampling.h"

namespace tessera::models {

void SamplingOptions::validate() const {
  require(std::isfinite(temperature) && temperature >= 0, "temperature must be 0 or more, got {}",
          temperature);
  require(top_k >= 0, "top-k must be 0 (off) or more, got {}", top_k);
  require(top_p > 0 && top_p <= 1, "top-p must be in (0, 1], got {}", top_p);
  require(min_p >= 0 && min_p <= 1, "min-p must be in [0, 1], got {}", min_p);
  require(repetition_penalty >= 0.01 && repetition_penalty <= 100,
          "the repetition penalty must be in [0.01, 100], got {}", repetition_penalty);
}

Tensor sample(const Tensor& logits, const SamplingOptions& options, const RngKey& key,
              std::uint64_t first_draw) {
  options.validate();
  require(logits.shape().size() == 2 && logits.dim(1) >= 1, "logits must be [B, V], got shape {}",
          logits.shape());
  require(logits.is_contiguous(), "logits must be contiguous, got shape {} with strides {}",
          logits.shape(), logits.strides());
  require<Unsupported>(
      logits.dtype() == DType::F32 && logits.dim(1) <= kernels::kMostSampledColumns,
      "sampling takes f32 logits of at most {} columns, got {} of shape {}",
      kernels::kMostSampledColumns, logits.dtype(), logits.shape());
  Tensor tokens =
      Tensor::empty(logits.context(), {logits.dim(0)}, DType::I32, MemoryCategory::Data, "tokens");
  kernels::sample(*logits.context(),
                  {logits.view(), tokens.view(), options.temperature, options.top_k, options.top_p,
                   options.min_p, key, first_draw});
  return tokens;
}

Tensor penalize_repetition(const Tensor& logits, std::span<const std::int32_t> tokens,
                           double penalty) {
  std::vector<float> values = logits.to_vector<float>();
  std::vector<std::int32_t> distinct(tokens.begin(), tokens.end());
  std::ranges::sort(distinct);
  const auto repeats = std::ranges::unique(distinct);
  distinct.erase(repeats.begin(), repeats.end());
  const auto factor = static_cast<float>(penalty);
  for (const std::int32_t token : distinct) {
    float& logit = values.at(static_cast<std::size_t>(token));
    logit = logit < 0 ? logit * factor : logit / factor;
  }
  return Tensor::from<float>(logits.context(), logits.shape(), std::span<const float>(values));
}

}  // namespace tessera::models
