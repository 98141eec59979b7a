#include "core/ops/norm.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/dispatch.h"
#include "kernels/norm.h"

namespace tessera::ops {

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const auto& context = common_context("layer_norm", {&x, &weight, &bias});
  check_rows("layer_norm", "x", x);
  const Shape channels{x.shape().back()};
  check_shape("layer_norm", "weight", weight, channels);
  check_dtype("layer_norm", "weight", weight, x.dtype());
  check_contiguous("layer_norm", "weight", weight);
  check_shape("layer_norm", "bias", bias, channels);
  check_dtype("layer_norm", "bias", bias, x.dtype());
  check_contiguous("layer_norm", "bias", bias);
  require(channels[0] > 0, "layer_norm: the last dim must not be empty, got shape {}", x.shape());
  require(eps > 0, "layer_norm: eps must be above 0, got {}", eps);

  const bool recorded = autograd::needs_grad({&x, &weight, &bias});
  const auto result = [&](const Shape& shape, DType dtype) {
    return Tensor::empty(context, shape, dtype, MemoryCategory::Activations, "layer_norm");
  };
  Tensor y = result(x.shape(), x.dtype());
  Tensor mean, rstd;
  kernels::LayerNormForward args{as_rows(x.view()), weight.view(), bias.view(), as_rows(y.view())};
  args.eps = eps;
  if (recorded) {
    const DType accumulator = kernels::accumulator_dtype(x.dtype());
    mean = result({row_count(x.shape())}, accumulator);
    rstd = result({row_count(x.shape())}, accumulator);
    args.mean = mean.view();
    args.rstd = rstd.view();
  }
  kernels::layer_norm_forward(*context, args);

  if (recorded) {
    using autograd::SavedTensor;
    const auto backward = [saved_x = SavedTensor(x), saved_weight = SavedTensor(weight), mean,
                           rstd](const Tensor& grad_y, autograd::InputGradients& into) {
      kernels::layer_norm_backward(
          *grad_y.context(),
          {as_rows(saved_x.get("layer_norm").view()), saved_weight.get("layer_norm").view(),
           mean.view(), rstd.view(), as_rows(grad_y.view()), as_rows(into.target(0)),
           into.weight_target(1), into.weight_target(2)});
    };
    autograd::record("layer_norm", y, {x, weight, bias}, backward);
  }
  return y;
}

}  // namespace tessera::ops
