#include "kernels/optimizer.h"

#include "kernels/cpu/optimizer.h"
#include "kernels/dispatch.h"
#include "kernels/workspace.h"

namespace tessera::kernels {
namespace {

void check_range(const Context& context, std::string_view kernel, std::string_view name,
                 const TensorView& view) {
  check_device(kernel, name, context, view);
  check_dtype(kernel, name, view, DType::F32);
  check_contiguous(kernel, name, view);
}

void check(const Context& context, const AdamW& args) {
  check_range(context, "adamw", "param", args.param);
  check_range(context, "adamw", "grad", args.grad);
  check_range(context, "adamw", "exp_avg", args.exp_avg);
  check_range(context, "adamw", "exp_avg_sq", args.exp_avg_sq);
  check_shape("adamw", "grad", args.grad, args.param.shape);
  check_shape("adamw", "exp_avg", args.exp_avg, args.param.shape);
  check_shape("adamw", "exp_avg_sq", args.exp_avg_sq, args.param.shape);
  require(args.step >= 1, "adamw: step counts from 1, got {}", args.step);
  require(args.beta1 >= 0 && args.beta1 < 1 && args.beta2 >= 0 && args.beta2 < 1,
          "adamw: beta1 and beta2 must be in [0, 1), got {} and {}", args.beta1, args.beta2);
  require(args.eps >= 0, "adamw: eps must not be negative, got {}", args.eps);
}

}  // namespace

TESSERA_CPU_KERNEL(adamw, AdamW)

void adamw(Context& context, const AdamW& args) {
  check(context, args);
  if (args.param.numel() == 0) return;
  TESSERA_DISPATCH(adamw, context, args);
}

TESSERA_CPU_KERNEL(sum_of_squares, cpu::SumOfSquares)

namespace {
void dispatch_sum_of_squares(Context& context, const cpu::SumOfSquares& args) {
  TESSERA_DISPATCH(sum_of_squares, context, args);
}
}  // namespace

double sum_of_squares(Context& context, const TensorView& x) {
  check_range(context, "sum_of_squares", "x", x);
  const std::int64_t n = x.numel();
  if (n == 0 || context.device().type == DeviceType::Meta) return 0;
  const std::int64_t blocks = (n + cpu::kSumBlock - 1) / cpu::kSumBlock;
  const Workspace workspace(context, static_cast<std::size_t>(blocks) * sizeof(double),
                            "sum_of_squares");
  auto* partials = static_cast<double*>(workspace.data());
  dispatch_sum_of_squares(context, {x.as<const float>(), n, partials});
  double sum = 0;
  for (std::int64_t i = 0; i < blocks; ++i) sum += partials[i];
  return sum;
}

}  // namespace tessera::kernels
