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

kernels::AdamW step_arguments(const char* name, const AdamWOptions& settings,
                              const Segment& segment, const UpdateOptions& options,
                              std::size_t states, DType first, DType second) {
  const auto& state = segment.state;
  require(state.size() == states, "{}: expected {} state tensors, got {}", name, states,
          state.size());
  const Tensor &param = segment.param, &grad = segment.grad, &copy = segment.copy;
  common_context(name, {&param, &grad, &state[0], &state[1], &options.factor, &copy});
  const bool is_half = param.dtype() == DType::BF16;
  ops::check_dims(name, "param", param, 1, "[n]");
  ops::check_dense(name, "param", param, is_half ? DType::BF16 : DType::F32, param.shape());
  ops::check_dense(name, "grad", grad, DType::F32, param.shape());
  ops::check_dense(name, "exp_avg", state[0], first, param.shape());
  ops::check_dense(name, "exp_avg_sq", state[1], second, param.shape());
  ops::check_dense(name, "factor", options.factor, DType::F32, {1});
  require(!is_half || !copy.defined(), "{}: a bf16 param needs no copy", name);
  if (copy.defined()) ops::check_dense(name, "copy", copy, DType::BF16, param.shape());
  require(options.step >= 1, "{}: step counts from 1, got {}", name, options.step);
  return {.param = param.view(),
          .grad = grad.view(),
          .exp_avg = state[0].view(),
          .exp_avg_sq = state[1].view(),
          .ranges = {},
          .beta1 = settings.beta1,
          .beta2 = settings.beta2,
          .eps = settings.eps,
          .step = options.step,
          .factor = options.factor.view(),
          .copy = copy.defined() ? copy.view() : TensorView{},
          .stochastic = is_half,
          .rng = is_half ? param.context()->rng_step() : nullptr,
          .decay = settings.decay};
}

void add_parameters(kernels::AdamW& args, const AdamWOptions& settings, const Segment& segment,
                    double lr) {
  const ShardLayout& layout = segment.layout;
  for (const SlotRange& range :
       layout.ranges(segment.first, segment.first + segment.param.numel())) {
    const ParameterSlot& slot = layout.slots()[static_cast<std::size_t>(range.slot)];
    args.ranges.push_back({.begin = range.offset,
                           .end = range.offset + range.end - range.begin,
                           .lr = lr * static_cast<double>(slot.lr_scale),
                           .weight_decay = slot.decay ? settings.weight_decay : 0.0,
                           .place = hash_text(slot.name),
                           .first_element = static_cast<std::uint64_t>(range.begin)});
  }
}

void AdamW::update(const Segment& segment, const UpdateOptions& options) const {
  kernels::AdamW args =
      step_arguments("adamw", options_, segment, options, 2, DType::F32, DType::F32);
  const Tensor& param = segment.param;
  if (args.stochastic) {
    add_parameters(args, options_, segment, options.lr);
  } else {
    for (const UpdateRange& range : update_ranges(segment.layout, segment.first, param.numel()))
      args.ranges.push_back({.begin = range.begin,
                             .end = range.end,
                             .lr = options.lr * static_cast<double>(range.lr_scale),
                             .weight_decay = range.decay ? options_.weight_decay : 0.0});
  }
  kernels::adamw(*param.context(), args);
}

}  // namespace tessera::optim
