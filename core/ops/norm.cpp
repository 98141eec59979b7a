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

Tensor result(const Tensor& x, std::string_view owner) {
  return Tensor::empty(x.context(), x.shape(), x.dtype(), MemoryCategory::Activations, owner);
}

// One value per row of x, in the accumulator dtype.
Tensor statistic(const Tensor& x, std::string_view owner) {
  return Tensor::empty(x.context(), {row_count(x.shape())}, kernels::accumulator_dtype(x.dtype()),
                       MemoryCategory::Activations, owner);
}

// Records the residual addition, whose sum is the norm's input.
Tensor record_sum(Tensor sum, const Tensor& x, const Tensor& residual) {
  if (autograd::needs_grad({&x, &residual})) {
    autograd::record("add", sum, {x, residual},
                     [](const Tensor& grad_sum, autograd::InputGradients& into) {
                       into.pass(0, grad_sum);
                       into.pass(1, grad_sum);
                     });
    if (autograd::wants_gradient_sums(x) || autograd::wants_gradient_sums(residual))
      autograd::want_gradient_sums(sum);
  }
  return sum;
}

enum class Kind { LayerNorm, RmsNorm };

// @param residual  may be undefined
// @param bias      layer norm only
SumAndNorm norm_of(Kind kind, std::string_view operation, const Tensor& x, const Tensor& residual,
                   const Tensor& given_weight, const Tensor& bias, double eps, double offset) {
  const bool is_layer_norm = kind == Kind::LayerNorm;
  const std::string_view owner = is_layer_norm ? "layer_norm" : "rms_norm";
  const auto& context = common_context(operation, {&x, &residual, &given_weight, &bias});
  check_input(operation, x, eps);
  const Tensor weight = given_weight.defined() || is_layer_norm
                            ? given_weight
                            : Tensor::full(context, {x.shape().back()}, x.dtype(), 1.0 - offset,
                                           MemoryCategory::Activations, "no weight");
  check_dense(operation, "weight", weight, x.dtype(), {x.shape().back()});
  if (is_layer_norm) check_dense(operation, "bias", bias, x.dtype(), {x.shape().back()});

  Tensor sum, mean, rstd;
  if (residual.defined()) {
    check_dense(operation, "residual", residual, x.dtype(), x.shape());
    sum = result(x, "add");
  }
  const bool recorded = autograd::needs_grad({&x, &residual, &weight, &bias});
  if (recorded) rstd = statistic(x, owner);
  if (recorded && is_layer_norm) mean = statistic(x, owner);
  Tensor y = result(x, owner);
  const auto view = [](const Tensor& t) { return t.defined() ? t.view() : TensorView{}; };
  const auto rows = [](const Tensor& t) { return t.defined() ? as_rows(t.view()) : TensorView{}; };
  const auto forward = is_layer_norm ? kernels::layer_norm_forward : kernels::rms_norm_forward;
  forward(*context, {rows(x), weight.view(), view(bias), rows(y), view(mean), view(rstd), eps,
                     rows(residual), rows(sum), offset});
  if (!recorded) return {sum, y};

  const Tensor input = residual.defined() ? record_sum(sum, x, residual) : x;
  const auto backward = [saved_x = SavedTensor(input), saved_weight = SavedTensor(weight), mean,
                         rstd, owner,
                         offset](const Tensor& grad_y, autograd::InputGradients& into) {
    const TensorView in = as_rows(saved_x.get(owner).view()), grad = as_rows(grad_y.view());
    const GradientView grad_x = as_rows(into.target(0));
    kernels::NormBackward args{.x = in,
                               .weight = saved_weight.get(owner).view(),
                               .rstd = rstd.view(),
                               .grad_y = grad,
                               .grad_x = grad_x,
                               .grad_weight = into.weight_target(1),
                               .offset = offset,
                               .grad_x_sums = into.sums_target(0)};
    if (mean.defined()) {
      args.mean = mean.view();
      args.grad_bias = into.weight_target(2);
      kernels::layer_norm_backward(*grad_y.context(), args);
    } else {
      kernels::rms_norm_backward(*grad_y.context(), args);
    }
  };
  std::vector<Tensor> inputs = {input, weight};
  if (is_layer_norm) inputs.push_back(bias);
  autograd::record(owner, y, inputs, backward);
  autograd::recompute_if_cheap(
      y, owner, {input, weight, bias},
      [forward, eps, offset](std::span<const Tensor> in, const TensorView& to) {
        kernels::NormForward args{.x = as_rows(in[0].view()),
                                  .weight = in[1].view(),
                                  .y = as_rows(to),
                                  .eps = eps,
                                  .offset = offset};
        if (in[2].defined()) args.bias = in[2].view();
        forward(*in[0].context(), args);
      });
  return {sum, y};
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return norm_of(Kind::LayerNorm, "layer_norm", x, {}, weight, bias, eps, 0.0).y;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset) {
  return norm_of(Kind::RmsNorm, "rms_norm", x, {}, weight, {}, eps, offset).y;
}

SumAndNorm add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                          const Tensor& bias, double eps) {
  require(residual.defined(), "add_layer_norm: residual is undefined");
  return norm_of(Kind::LayerNorm, "add_layer_norm", x, residual, weight, bias, eps, 0.0);
}

SumAndNorm add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                        double offset) {
  require(residual.defined(), "add_rms_norm: residual is undefined");
  return norm_of(Kind::RmsNorm, "add_rms_norm", x, residual, weight, {}, eps, offset);
}

}  // namespace tessera::ops
