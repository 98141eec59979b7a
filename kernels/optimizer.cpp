#include "kernels/optimizer.h"

#include <algorithm>
#include <cmath>

#include "core/base/device_backend.h"
#include "kernels/dispatch.h"
#include "kernels/workspace.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(adamw, AdamW)

namespace {

bool is_empty(const AdamW& args) {
  return std::ranges::all_of(args.ranges,
                             [](const AdamWRange& range) { return range.begin == range.end; });
}

AdamW with_rates(AdamW args) {
  const auto t = static_cast<double>(args.step);
  args.rates = {.v_scale = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(args.beta2, t))),
                .scale = static_cast<float>(args.grad_scale),
                .eps = static_cast<float>(args.eps),
                .beta1 = static_cast<float>(args.beta1),
                .beta2 = static_cast<float>(args.beta2),
                .one_minus_beta1 = static_cast<float>(1.0 - args.beta1),
                .one_minus_beta2 = static_cast<float>(1.0 - args.beta2)};
  for (AdamWRange& range : args.ranges) {
    range.decay = static_cast<float>(1.0 - range.lr * range.weight_decay);
    range.rate = static_cast<float>(range.lr / (1.0 - std::pow(args.beta1, t)));
  }
  return args;
}

}  // namespace

void adamw(Context& context, const AdamW& given) {
  if (is_empty(given)) return;
  const AdamW args = with_rates(given);
  TESSERA_DISPATCH(adamw, context, args);
}

TESSERA_CPU_KERNEL(adamw_8bit, AdamW8bit)

void adamw_8bit(Context& context, const AdamW8bit& given) {
  if (is_empty(given.step)) return;
  const AdamW8bit args{with_rates(given.step), given.exp_avg_scale, given.exp_avg_sq_scale};
  TESSERA_DISPATCH(adamw_8bit, context, args);
}

TESSERA_KERNEL_IF(muon_momentum, MuonMomentum, args.grad.numel() > 0)
TESSERA_KERNEL_IF(moving_average, MovingAverage, args.param.numel() > 0)
TESSERA_KERNEL_IF(normalize, Normalize, args.x.numel() > 0)
TESSERA_KERNEL_IF(weight_update, WeightUpdate, args.param.numel() > 0)

TESSERA_CPU_KERNEL(sum_of_squares, SumOfSquares)

void sum_of_squares(Context& context, const SumOfSquares& args) {
  check_dense("sum_of_squares", "x", context, args.x, DType::F32);
  check_single("sum_of_squares", "sum", context, args.sum, DType::F64);
  TESSERA_DISPATCH_WITH_SCRATCH(sum_of_squares, context, args);
}

TESSERA_CPU_KERNEL(clip_factor, ClipFactor)

void clip_factor(Context& context, const ClipFactor& args) {
  check_dense("clip_factor", "totals", context, args.totals, DType::F64);
  require(args.totals.numel() >= 1, "clip_factor: totals must not be empty");
  check_single("clip_factor", "factor", context, args.factor, DType::F32);
  require(args.max_norm >= 0, "clip_factor: max_norm must not be negative, got {}", args.max_norm);
  TESSERA_DISPATCH(clip_factor, context, args);
}

double sum_of_squares(Context& context, const TensorView& x) {
  double result = 0;
  if (context.device().type != DeviceType::CUDA) {
    sum_of_squares(context, {x, dense_view(&result, DType::F64, {1}, context.device())});
    return result;
  }
  const Workspace sum(context, sizeof(double), "sum_of_squares");
  sum_of_squares(context, {x, dense_view(sum.data(), DType::F64, {1}, context.device())});
  context.backend().copy_to_host(&result, sum.data(), sizeof(result));
  return result;
}

}  // namespace tessera::kernels
