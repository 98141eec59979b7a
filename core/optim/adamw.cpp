#include "core/optim/adamw.h"

#include "core/ops/checks.h"
#include "kernels/optimizer.h"

namespace tessera::optim {

namespace {

void check(const AdamWOptions& options) {
  require(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
          "adamw: beta1 and beta2 must be in [0, 1), got {} and {}", options.beta1, options.beta2);
  require(options.eps >= 0, "adamw: eps must not be negative, got {}", options.eps);
}

}  // namespace

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
  common_context("adamw", {&param, &grad, &exp_avg, &exp_avg_sq, &factor, &copy});
  const bool is_half = param.dtype() == DType::BF16;
  ops::check_dims("adamw", "param", param, 1, "[n]");
  ops::check_dense("adamw", "param", param, is_half ? DType::BF16 : DType::F32, param.shape());
  ops::check_dense("adamw", "grad", grad, DType::F32, param.shape());
  ops::check_dense("adamw", "exp_avg", exp_avg, DType::F32, param.shape());
  ops::check_dense("adamw", "exp_avg_sq", exp_avg_sq, DType::F32, param.shape());
  ops::check_dense("adamw", "factor", factor, DType::F32, {1});
  require(!is_half || !copy.defined(), "adamw: a bf16 param needs no copy");
  if (copy.defined()) ops::check_dense("adamw", "copy", copy, DType::BF16, param.shape());
  require(step >= 1, "adamw: step counts from 1, got {}", step);
  check(options);

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
                    .stochastic = is_half,
                    .rng = is_half ? param.context()->rng_step() : nullptr,
                    .place = place,
                    .first_element = static_cast<std::uint64_t>(first_element + range.begin)});
  }
}

}  // namespace tessera::optim
