#include "core/optim/adamw.h"

#include "kernels/optimizer.h"

namespace tessera::optim {

std::vector<DecayRange> decay_ranges(const ShardLayout& layout, std::int64_t first,
                                     std::int64_t segment) {
  std::vector<DecayRange> ranges;
  for (const SlotRange& part : layout.ranges(first, first + segment)) {
    const bool decay = layout.slots()[static_cast<std::size_t>(part.slot)].decay;
    if (!ranges.empty() && ranges.back().decay == decay) continue;
    if (!ranges.empty()) ranges.back().end = part.offset;
    ranges.push_back({ranges.empty() ? 0 : part.offset, segment, decay});
  }
  return ranges;
}

void adamw_step(const AdamWOptions& options, const std::vector<DecayRange>& ranges,
                const Tensor& param, const Tensor& grad, const Tensor& exp_avg,
                const Tensor& exp_avg_sq, double lr, std::int64_t step, const Tensor& factor,
                const Tensor& copy, std::uint64_t place, std::int64_t first_element) {
  for (const DecayRange& range : ranges) {
    const auto part = [&range](const Tensor& t) {
      return t.alias({range.end - range.begin}, {1}, range.begin).view();
    };
    kernels::adamw(*param.context(),
                   {.param = part(param),
                    .grad = part(grad),
                    .exp_avg = part(exp_avg),
                    .exp_avg_sq = part(exp_avg_sq),
                    .lr = lr,
                    .beta1 = options.beta1,
                    .beta2 = options.beta2,
                    .eps = options.eps,
                    .weight_decay = range.decay ? options.weight_decay : 0.0,
                    .step = step,
                    .factor = factor.view(),
                    .copy = copy.defined() ? part(copy) : TensorView{},
                    .stochastic = param.dtype() == DType::BF16,
                    .rng = param.dtype() == DType::BF16 ? param.context()->rng_step() : nullptr,
                    .place = place,
                    .first_element = static_cast<std::uint64_t>(first_element + range.begin)});
  }
}

}  // namespace tessera::optim
