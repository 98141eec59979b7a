#include "core/optim/adamw8bit.h"

#include "core/base/rng.h"
#include "core/ops/checks.h"
#include "kernels/moment_code.h"
#include "kernels/optimizer.h"

namespace tessera::optim {

static_assert(ShardLayout::kAlignment % kernels::kMomentBlock == 0,
              "parameters and segments begin with a block");

AdamW8bit::AdamW8bit(const AdamWOptions& options) : options_(AdamW(options).options()) {}

std::vector<std::string> AdamW8bit::state_names() const {
  return {"exp_avg_code", "exp_avg_sq_code", "exp_avg_scale", "exp_avg_sq_scale"};
}

StateKind AdamW8bit::state_kind(std::size_t i) const {
  if (i == 0) return {DType::I8, 1};
  if (i == 1) return {DType::U8, 1};
  return {DType::F32, kernels::kMomentBlock};
}

void AdamW8bit::update(const Segment& segment, const UpdateOptions& options) const {
  require(segment.state.size() == 4, "adamw8bit: expected 4 state tensors, got {}",
          segment.state.size());
  const Tensor &param = segment.param, &grad = segment.grad, &copy = segment.copy;
  const auto& state = segment.state;
  common_context("adamw8bit", {&param, &grad, &state[0], &state[1], &state[2], &state[3],
                               &options.factor, &copy});
  const bool is_half = param.dtype() == DType::BF16;
  const Shape scales{param.numel() / kernels::kMomentBlock};
  ops::check_dense("adamw8bit", "param", param, is_half ? DType::BF16 : DType::F32, param.shape());
  ops::check_dense("adamw8bit", "grad", grad, DType::F32, param.shape());
  ops::check_dense("adamw8bit", "exp_avg", state[0], DType::I8, param.shape());
  ops::check_dense("adamw8bit", "exp_avg_sq", state[1], DType::U8, param.shape());
  ops::check_dense("adamw8bit", "exp_avg_scale", state[2], DType::F32, scales);
  ops::check_dense("adamw8bit", "exp_avg_sq_scale", state[3], DType::F32, scales);
  ops::check_dense("adamw8bit", "factor", options.factor, DType::F32, {1});
  if (copy.defined()) ops::check_dense("adamw8bit", "copy", copy, DType::BF16, param.shape());
  require(options.step >= 1, "adamw8bit: step counts from 1, got {}", options.step);

  kernels::AdamW8bit args{.step = {.param = param.view(),
                                   .grad = grad.view(),
                                   .exp_avg = state[0].view(),
                                   .exp_avg_sq = state[1].view(),
                                   .ranges = {},
                                   .beta1 = options_.beta1,
                                   .beta2 = options_.beta2,
                                   .eps = options_.eps,
                                   .step = options.step,
                                   .factor = options.factor.view(),
                                   .copy = copy.defined() ? copy.view() : TensorView{},
                                   .stochastic = is_half,
                                   .rng = is_half ? param.context()->rng_step() : nullptr,
                                   .decay = options_.decay},
                          .exp_avg_scale = state[2].view(),
                          .exp_avg_sq_scale = state[3].view()};
  const ShardLayout& layout = segment.layout;
  for (const SlotRange& range : layout.ranges(segment.first, segment.first + param.numel())) {
    const ParameterSlot& slot = layout.slots()[static_cast<std::size_t>(range.slot)];
    args.step.ranges.push_back({.begin = range.offset,
                                .end = range.offset + range.end - range.begin,
                                .lr = options.lr * static_cast<double>(slot.lr_scale),
                                .weight_decay = slot.decay ? options_.weight_decay : 0.0,
                                .place = hash_text(slot.name),
                                .first_element = static_cast<std::uint64_t>(range.begin)});
  }
  kernels::adamw_8bit(*param.context(), args);
}

}  // namespace tessera::optim
