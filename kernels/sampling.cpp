#include "kernels/sampling.h"

#include <algorithm>
#include <cmath>

#include "kernels/checks.h"

namespace tessera::kernels {
namespace {

constexpr auto kName = "sample";

void check(const Context& context, const Sampling& args) {
  const TensorView& logits = args.logits;
  check_device(kName, "logits", context, logits);
  require<Unsupported>(logits.dtype == DType::F32,
                       "sample is not available for logits of dtype {}; use f32", logits.dtype);
  require(logits.shape.size() == 2 && logits.shape[1] >= 1,
          "sample: logits must have shape [rows, vocabulary], got {}", logits.shape);
  require<Unsupported>(logits.shape[1] <= kMostSampledColumns,
                       "sample takes at most {} columns, got logits of shape {}",
                       kMostSampledColumns, logits.shape);
  require(logits.shape[1] == 1 || logits.strides[1] == 1,
          "sample: the last dim of logits must be contiguous, got shape {} with strides {}",
          logits.shape, logits.strides);
  check_dense(kName, "tokens", context, args.tokens, DType::I32, {logits.shape[0]});
  require(std::isfinite(args.temperature) && args.temperature >= 0.0,
          "sample: temperature must be 0 or more, got {}", args.temperature);
  require(args.top_k >= 0, "sample: top_k must be 0 (off) or more, got {}", args.top_k);
  require(args.top_p > 0.0 && args.top_p <= 1.0, "sample: top_p must be in (0, 1], got {}",
          args.top_p);
}

// On the CPU, rows that nothing could be drawn from are told of.
void check_tokens(const Sampling& args) {
  const auto* tokens = args.tokens.as<const std::int32_t>();
  for (std::int64_t row = 0; row < args.logits.shape[0]; ++row) {
    if (tokens[row] >= 0) continue;
    const auto* first = args.logits.as<const float>() + row * args.logits.strides[0];
    const auto* last = first + args.logits.shape[1];
    require(!std::any_of(first, last, [](float logit) { return std::isnan(logit); }),
            "sample: a logit of row {} is NaN: the model's weights are not usable", row);
    throw InvalidArgument(
        "sample: the largest logit of row {} is {}: the model's weights are not usable", row,
        *std::max_element(first, last));
  }
}

}  // namespace

TESSERA_CPU_KERNEL(sample, Sampling)

void sample(Context& context, const Sampling& args) {
  check(context, args);
  if (args.logits.shape[0] == 0) return;
  const auto run = [&] { TESSERA_DISPATCH(sample, context, args); };
  run();
  if (context.device().type == DeviceType::CPU) check_tokens(args);
}

}  // namespace tessera::kernels
