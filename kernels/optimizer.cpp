#include "kernels/optimizer.h"

#include <cmath>

#include "kernels/checks.h"
#include "kernels/workspace.h"

namespace tessera::kernels {
namespace {

void check_range(const Context& context, std::string_view kernel, std::string_view name,
                 const TensorView& view, DType dtype = DType::F32) {
  check_device(kernel, name, context, view);
  check_dtype(kernel, name, view, dtype);
  check_contiguous(kernel, name, view);
}

void check_single(const Context& context, std::string_view kernel, std::string_view name,
                  const TensorView& view, DType dtype) {
  check_device(kernel, name, context, view);
  check_dtype(kernel, name, view, dtype);
  require(view.numel() == 1, "{}: {} must have one element, got shape {}", kernel, name,
          view.shape);
}

void check(const Context& context, const AdamW& args) {
  const bool half = args.param.dtype == DType::BF16;
  check_range(context, "adamw", "param", args.param, half ? DType::BF16 : DType::F32);
  check_range(context, "adamw", "grad", args.grad);
  check_range(context, "adamw", "exp_avg", args.exp_avg);
  check_range(context, "adamw", "exp_avg_sq", args.exp_avg_sq);
  check_shape("adamw", "grad", args.grad, args.param.shape);
  check_shape("adamw", "exp_avg", args.exp_avg, args.param.shape);
  check_shape("adamw", "exp_avg_sq", args.exp_avg_sq, args.param.shape);
  if (args.factor.defined()) check_single(context, "adamw", "factor", args.factor, DType::F32);
  if (args.copy.defined()) {
    require(!half, "adamw: a bf16 param needs no copy");
    check_range(context, "adamw", "copy", args.copy, DType::BF16);
    check_shape("adamw", "copy", args.copy, args.param.shape);
  }
  require(half || !args.stochastic, "adamw: only a bf16 param is rounded, got {}",
          args.param.dtype);
  require(args.step >= 1, "adamw: step counts from 1, got {}", args.step);
  require(args.beta1 >= 0 && args.beta1 < 1 && args.beta2 >= 0 && args.beta2 < 1,
          "adamw: beta1 and beta2 must be in [0, 1), got {} and {}", args.beta1, args.beta2);
  require(args.eps >= 0, "adamw: eps must not be negative, got {}", args.eps);
}

}  // namespace

TESSERA_CPU_KERNEL(adamw, AdamW)

void adamw(Context& context, const AdamW& given) {
  check(context, given);
  if (given.param.numel() == 0) return;
  AdamW args = given;
  const auto t = static_cast<double>(args.step);
  args.rates = {.decay = static_cast<float>(1.0 - args.lr * args.weight_decay),
                .rate = static_cast<float>(args.lr / (1.0 - std::pow(args.beta1, t))),
                .v_scale = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(args.beta2, t)))};
  TESSERA_DISPATCH(adamw, context, args);
}

TESSERA_CPU_KERNEL(sum_of_squares, SumOfSquares)

void sum_of_squares(Context& context, const SumOfSquares& args) {
  check_range(context, "sum_of_squares", "x", args.x);
  check_single(context, "sum_of_squares", "sum", args.sum, DType::F64);
  TESSERA_DISPATCH(sum_of_squares, context, args);
}

TESSERA_CPU_KERNEL(clip_factor, ClipFactor)

void clip_factor(Context& context, const ClipFactor& args) {
  check_range(context, "clip_factor", "totals", args.totals, DType::F64);
  require(args.totals.numel() >= 1, "clip_factor: totals must not be empty");
  check_single(context, "clip_factor", "factor", args.factor, DType::F32);
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
