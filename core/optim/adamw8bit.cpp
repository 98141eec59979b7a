#include "core/optim/adamw8bit.h"

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
  kernels::AdamW8bit args;
  args.step = step_arguments("adamw8bit", options_, segment, options, 4, DType::I8, DType::U8);
  const Tensor& param = segment.param;
  const Tensor &first = segment.state[2], &second = segment.state[3];
  common_context("adamw8bit", {&param, &first, &second});
  const Shape scales{param.numel() / kernels::kMomentBlock};
  ops::check_dense("adamw8bit", "exp_avg_scale", first, DType::F32, scales);
  ops::check_dense("adamw8bit", "exp_avg_sq_scale", second, DType::F32, scales);
  args.exp_avg_scale = first.view();
  args.exp_avg_sq_scale = second.view();
  add_parameters(args.step, options_, segment, options.lr);
  kernels::adamw_8bit(*param.context(), args);
}

}  // namespace tessera::optim
