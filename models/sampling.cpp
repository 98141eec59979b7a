#include "models/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/base/error.h"

namespace tessera::models {

void SamplingOptions::validate() const {
  require(std::isfinite(temperature) && temperature >= 0, "temperature must be 0 or more, got {}",
          temperature);
  require(top_k >= 0, "top-k must be 0 (off) or more, got {}", top_k);
  require(top_p > 0 && top_p <= 1, "top-p must be in (0, 1], got {}", top_p);
}

std::int32_t sample(std::span<const float> logits, const SamplingOptions& options,
                    const RngKey& key, std::uint64_t draw) {
  options.validate();
  require(!logits.empty(), "no logits to sample from");
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto logit = [&](std::int32_t id) { return logits[static_cast<std::size_t>(id)]; };
  const auto more_likely = [&](std::int32_t a, std::int32_t b) {
    return logit(a) != logit(b) ? logit(a) > logit(b) : a < b;
  };
  for (const float value : logits) {
    require(!std::isnan(value), "a logit is NaN: the model's weights are not usable");
  }
  const std::int32_t best = *std::min_element(order.begin(), order.end(), more_likely);
  require(std::isfinite(logit(best)), "no logit is finite: the model's weights are not usable");
  if (options.temperature == 0) return best;

  std::size_t kept = order.size();
  if (options.top_k > 0) kept = std::min(kept, static_cast<std::size_t>(options.top_k));
  if (kept < order.size() || options.top_p < 1) {
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                      more_likely);
  }
  std::vector<double> weight(kept);
  double total = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    weight[i] = std::exp((static_cast<double>(logit(order[i])) - static_cast<double>(logit(best))) /
                         options.temperature);
    total += weight[i];
  }
  if (options.top_p < 1) {
    double reached = 0;
    std::size_t needed = 0;
    while (needed < kept && reached < options.top_p * total) reached += weight[needed++];
    kept = std::max<std::size_t>(needed, 1);
    total = reached;
  }
  double target = static_cast<double>(uniform_from_bits(key.word(draw))) * total;
  for (std::size_t i = 0; i < kept; ++i) {
    target -= weight[i];
    if (target < 0) return order[i];
  }
  return order[kept - 1];
}

}  // namespace tessera::models
