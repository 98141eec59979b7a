#include "core/ops/linear.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace tessera::ops {
namespace {

void product(Context& context, const TensorView& a, bool transpose_a, const TensorView& b,
             bool transpose_b, const GradientView& c) {
  kernels::Matmul args{a, b, c.view, transpose_a, transpose_b, c.accumulate};
  kernels::matmul(context, args);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout) {
  const auto& context = common_context("linear", {&x, &weight, &bias});
  const bool out_in = layout == WeightLayout::OutIn;
  check_rows("linear", "x", x);
  check_dims("linear", "weight", weight, 2, out_in ? "[out, in]" : "[in, out]");
  check_dtype("linear", "weight", weight, x.dtype());
  check_contiguous("linear", "weight", weight);
  const std::int64_t in = weight.dim(out_in ? 1 : 0);
  const std::int64_t out = weight.dim(out_in ? 0 : 1);
  require(x.shape().back() == in,
          "linear: the last dim of x must be {}, as weight is {} ({}); got x of shape {}", in,
          weight.shape(), out_in ? "[out, in]" : "[in, out]", x.shape());
  if (bias.defined()) {
    check_shape("linear", "bias", bias, {out});
    check_dtype("linear", "bias", bias, x.dtype());
    check_contiguous("linear", "bias", bias);
  }

  Shape shape = x.shape();
  shape[shape.size() - 1] = out;
  Tensor y = Tensor::empty(context, shape, x.dtype(), MemoryCategory::Activations, "linear");
  kernels::Matmul args{as_rows(x.view()), weight.view(), as_rows(y.view()), false, out_in};
  if (bias.defined()) args.bias = bias.view();
  kernels::matmul(*context, args);

  if (autograd::needs_grad({&x, &weight, &bias})) {
    // Each of the two is kept only for the other's gradient.
    autograd::SavedTensor saved_x, saved_weight;
    if (weight.requires_grad()) saved_x = autograd::SavedTensor(x);
    if (x.requires_grad()) saved_weight = autograd::SavedTensor(weight);
    const auto backward = [saved_x, saved_weight, out_in](const Tensor& grad_y,
                                                          autograd::InputGradients& into) {
      Context& ctx = *grad_y.context();
      const TensorView grad = as_rows(grad_y.view());
      if (const GradientView grad_x = as_rows(into.target(0)))
        product(ctx, grad, false, saved_weight.get("linear").view(), !out_in, grad_x);
      if (const GradientView grad_weight = into.weight_target(1)) {
        const TensorView rows = as_rows(saved_x.get("linear").view());
        product(ctx, out_in ? grad : rows, true, out_in ? rows : grad, false, grad_weight);
      }
      if (const GradientView grad_bias = into.weight_target(2))
        kernels::sum_rows(ctx, grad, grad_bias);
    };
    autograd::record("linear", y, {x, weight, bias}, backward);
  }
  return y;
}

}  // namespace tessera::ops
