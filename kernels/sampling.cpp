#include "kernels/sampling.h"

#include <algorithm>
#include <cmath>

#include "kernels/dispatch.h"

namespace tessera::kernels {
namespace {

// Throws if the kernel marked a row as one that no token can be drawn from.
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
  if (args.logits.shape[0] == 0) return;
  const auto run = [&] { TESSERA_DISPATCH_WITH_SCRATCH(sample, context, args); };
  run();
  if (context.device().type == DeviceType::CPU) check_tokens(args);
}

}  // namespace tessera::kernels
