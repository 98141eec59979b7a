#include "models/sampling.h"

#include <cmath>

#include "kernels/sampling.h"

namespace tessera::models {

void SamplingOptions::validate() const {
  require(std::isfinite(temperature) && temperature >= 0, "temperature must be 0 or more, got {}",
          temperature);
  require(top_k >= 0, "top-k must be 0 (off) or more, got {}", top_k);
  require(top_p > 0 && top_p <= 1, "top-p must be in (0, 1], got {}", top_p);
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
  kernels::sample(*logits.context(), {logits.view(), tokens.view(), options.temperature,
                                      options.top_k, options.top_p, key, first_draw});
  return tokens;
}

}  // namespace tessera::models
