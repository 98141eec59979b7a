#include "core/optim/adamw.h"

#include "core/base/rng.h"
#include "core/ops/checks.h"
#include "kernels/optimizer.h"

namespace tessera::optim {

AdamW::AdamW(const AdamWOptions& options) : options_(options) {
  require(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
          "adamw: beta1 and beta2 must be in [0, 1), got {} and {}", options.beta1, options.beta2);
  require(options.eps >= 0, "adamw: eps must not be negative, got {}", options.eps);
}

std::vector<UpdateRange> update_ranges(const ShardLayout& layout, std::int64_t first,
                                       std::int64_t segment) {
  std::vector<UpdateRange> ranges;
  for (const SlotRange& part : layout.ranges(first, first + segment)) {
    const ParameterSlot& slot = layout.slots()[static_cast<std::size_t>(part.slot)];
    if (!ranges.empty() && ranges.back().decay == slot.decay &&
        ranges.back().lr_scale == slot.lr_scale)
      continue;
    if (!ranges.empty()) ranges.back().end = part.offset;
    ranges.push_back({ranges.empty() ? 0 : part.offset, segment, slot.decay, slot.lr_scale});
  }
  return ranges;
}

std::vector<std::string> AdamW::state_names() const { return {"exp_avg", "exp_avg_sq"}; }

void AdamW::update(const Segment& segment, const UpdateOptions& options) const {
  require(segment.state.size() == 2, "adamw: expected 2 state tensors, got {}",
          segment.state.size());
  const Tensor &param = segment.param, &grad = segment.grad, &copy = segment.copy;
  const Tensor &exp_avg = segment.state[0], &exp_avg_sq = segment.state[1];
  common_context("adamw", {&param, &grad, &exp_avg, &exp_avg_sq, &options.factor, &copy});
  const bool is_half = param.dtype() == DType::BF16;
  ops::check_dims("adamw", "param", param, 1, "[n]");
  ops::check_dense("adamw", "param", param, is_half ? DType::BF16 : DType::F32, param.shape());
  ops::check_dense("adamw", "grad", grad, DType::F32, param.shape());
  ops::check_dense("adamw", "exp_avg", exp_avg, DType::F32, param.shape());
  ops::check_dense("adamw", "exp_avg_sq", exp_avg_sq, DType::F32, param.shape());
  ops::check_dense("adamw", "factor", options.factor, DType::F32, {1});
  require(!is_half || !copy.defined(), "adamw: a bf16 param needs no copy");
  if (copy.defined()) ops::check_dense("adamw", "copy", copy, DType::BF16, param.shape());
  require(options.step >= 1, "adamw: step counts from 1, got {}", options.step);

  kernels::AdamW args{.param = param.view(),
                      .grad = grad.view(),
                      .exp_avg = exp_avg.view(),
                      .exp_avg_sq = exp_avg_sq.view(),
                      .ranges = {},
                      .beta1 = options_.beta1,
                      .beta2 = options_.beta2,
                      .eps = options_.eps,
                      .step = options.step,
                      .factor = options.factor.view(),
                      .copy = copy.defined() ? copy.view() : TensorView{},
                      .stochastic = is_half,
                      .rng = is_half ? param.context()->rng_step() : nullptr,
                      .decay = options_.decay};
  const auto add = [&](std::int64_t begin, std::int64_t end, const auto& settings,
                       std::uint64_t place, std::int64_t first_element) {
    args.ranges.push_back({.begin = begin,
                           .end = end,
                           .lr = options.lr * static_cast<double>(settings.lr_scale),
                           .weight_decay = settings.decay ? options_.weight_decay : 0.0,
                           .place = place,
                           .first_element = static_cast<std::uint64_t>(first_element)});
  };
  const ShardLayout& layout = segment.layout;
  if (is_half) {  // by parameter, so that random draws do not depend on units
    for (const SlotRange& range : layout.ranges(segment.first, segment.first + param.numel())) {
      const ParameterSlot& slot = layout.slots()[static_cast<std::size_t>(range.slot)];
      add(range.offset, range.offset + range.end - range.begin, slot, hash_text(slot.name),
          range.begin);
    }
  } else {
    for (const UpdateRange& range : update_ranges(layout, segment.first, param.numel()))
      add(range.begin, range.end, range, 0, 0);
  }
  kernels::adamw(*param.context(), args);
}

}  // namespace tessera::optim
