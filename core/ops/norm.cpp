#include "core/ops/norm.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/dispatch.h"
#include "kernels/norm.h"

namespace tessera::ops {
namespace {

using autograd::SavedTensor;

void check_input(std::string_view operation, const Tensor& x, double eps) {
  check_rows(operation, "x", x);
  require(x.shape().back() > 0, "{}: the last dim must not be empty, got shape {}", operation,
          x.shape());
  require(eps > 0, "{}: eps must be above 0, got {}", operation, eps);
}

void check_like(std::string_view operation, std::string_view argument, const Tensor& tensor,
                const Tensor& x, const Shape& shape) {
  check_shape(operation, argument, tensor, shape);
  check_dtype(operation, argument, tensor, x.dtype());
  check_contiguous(operation, argument, tensor);
}

Tensor result(const Tensor& x, std::string_view owner) {
  return Tensor::empty(x.context(), x.shape(), x.dtype(), MemoryCategory::Activations, owner);
}

// One value per row of x, in the accumulator dtype.
Tensor statistic(const Tensor& x, std::string_view owner) {
  return Tensor::empty(x.context(), {row_count(x.shape())}, kernels::accumulator_dtype(x.dtype()),
                       MemoryCategory::Activations, owner);
}

// Adds residual and sum to the arguments; sum is undefined without a residual.
template <typename Args>
void set_residual(Args& args, const Tensor& residual, const Tensor& sum) {
  if (!sum.defined()) return;
  args.residual = as_rows(residual.view());
  args.sum = as_rows(sum.view());
}

// Records the residual addition, whose sum is the norm's input.
Tensor record_sum(Tensor sum, const Tensor& x, const Tensor& residual) {
  if (autograd::needs_grad({&x, &residual})) {
    autograd::record("add", sum, {x, residual},
                     [](const Tensor& grad_sum, autograd::InputGradients& into) {
                       into.pass(0, grad_sum);
                       into.pass(1, grad_sum);
                     });
  }
  return sum;
}

SumAndNorm layer_norm_of(std::string_view operation, const Tensor& x, const Tensor& residual,
                         const Tensor& weight, const Tensor& bias, double eps) {
  constexpr std::string_view kOwner = "layer_norm";
  const auto& context = common_context(operation, {&x, &residual, &weight, &bias});
  check_input(operation, x, eps);
  const Shape channels{x.shape().back()};
  check_like(operation, "weight", weight, x, channels);
  check_like(operation, "bias", bias, x, channels);

  const bool recorded = autograd::needs_grad({&x, &residual, &weight, &bias});
  Tensor sum, mean, rstd;
  if (residual.defined()) {
    check_like(operation, "residual", residual, x, x.shape());
    sum = result(x, "add");
  }
  Tensor y = result(x, kOwner);
  kernels::LayerNormForward args{as_rows(x.view()), weight.view(), bias.view(), as_rows(y.view())};
  args.eps = eps;
  set_residual(args, residual, sum);
  if (recorded) {
    mean = statistic(x, kOwner);
    rstd = statistic(x, kOwner);
    args.mean = mean.view();
    args.rstd = rstd.view();
  }
  kernels::layer_norm_forward(*context, args);

  if (recorded) {
    const Tensor input = residual.defined() ? record_sum(sum, x, residual) : x;
    const auto backward = [saved_x = SavedTensor(input), saved_weight = SavedTensor(weight), mean,
                           rstd](const Tensor& grad_y, autograd::InputGradients& into) {
      kernels::layer_norm_backward(
          *grad_y.context(),
          {as_rows(saved_x.get("layer_norm").view()), saved_weight.get("layer_norm").view(),
           mean.view(), rstd.view(), as_rows(grad_y.view()), as_rows(into.target(0)),
           into.weight_target(1), into.weight_target(2)});
    };
    autograd::record("layer_norm", y, {input, weight, bias}, backward);
  }
  return {sum, y};
}

SumAndNorm rms_norm_of(std::string_view operation, const Tensor& x, const Tensor& residual,
                       const Tensor& weight, double eps) {
  constexpr std::string_view kOwner = "rms_norm";
  const auto& context = common_context(operation, {&x, &residual, &weight});
  check_input(operation, x, eps);
  check_like(operation, "weight", weight, x, {x.shape().back()});

  const bool recorded = autograd::needs_grad({&x, &residual, &weight});
  Tensor sum, rstd;
  if (residual.defined()) {
    check_like(operation, "residual", residual, x, x.shape());
    sum = result(x, "add");
  }
  Tensor y = result(x, kOwner);
  kernels::RmsNormForward args{as_rows(x.view()), weight.view(), as_rows(y.view())};
  args.eps = eps;
  set_residual(args, residual, sum);
  if (recorded) {
    rstd = statistic(x, kOwner);
    args.rstd = rstd.view();
  }
  kernels::rms_norm_forward(*context, args);

  if (recorded) {
    const Tensor input = residual.defined() ? record_sum(sum, x, residual) : x;
    const auto backward = [saved_x = SavedTensor(input), saved_weight = SavedTensor(weight), rstd](
                              const Tensor& grad_y, autograd::InputGradients& into) {
      kernels::rms_norm_backward(
          *grad_y.context(),
          {as_rows(saved_x.get("rms_norm").view()), saved_weight.get("rms_norm").view(),
           rstd.view(), as_rows(grad_y.view()), as_rows(into.target(0)), into.weight_target(1)});
    };
    autograd::record("rms_norm", y, {input, weight}, backward);
  }
  return {sum, y};
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return layer_norm_of("layer_norm", x, {}, weight, bias, eps).y;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return rms_norm_of("rms_norm", x, {}, weight, eps).y;
}

SumAndNorm add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                          const Tensor& bias, double eps) {
  require(residual.defined(), "add_layer_norm: residual is undefined");
  return layer_norm_of("add_layer_norm", x, residual, weight, bias, eps);
}

SumAndNorm add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  require(residual.defined(), "add_rms_norm: residual is undefined");
  return rms_norm_of("add_rms_norm", x, residual, weight, eps);
}

}  // namespace tessera::ops
