#include "core/ops/activation.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/activation.h"

namespace tessera::ops {

Tensor gelu(const Tensor& x) {
  const auto& context = common_context("gelu", {&x});
  check_computes("gelu", "x", x);
  check_contiguous("gelu", "x", x);

  Tensor y = Tensor::empty(context, x.shape(), x.dtype(), MemoryCategory::Activations, "gelu");
  kernels::gelu_forward(*context, {x.view(), y.view()});

  if (autograd::needs_grad({&x})) {
    const auto backward = [saved = autograd::SavedTensor(x)](const Tensor& grad_y,
                                                             autograd::InputGradients& into) {
      kernels::gelu_backward(*grad_y.context(),
                             {saved.get("gelu").view(), grad_y.view(), into.target(0)});
    };
    autograd::record("gelu", y, {x}, backward);
    autograd::recompute_if_cheap(y, "gelu", {x},
                                 [](std::span<const Tensor> in, const TensorView& to) {
                                   kernels::gelu_forward(*in[0].context(), {in[0].view(), to});
                                 });
  }
  return y;
}

namespace {

// Columns [index * H, (index + 1) * H) of packed rows [R, 2 H].
TensorView half(const TensorView& rows, int index) {
  const std::int64_t width = rows.shape[1] / 2;
  return rows.narrow(1, index * width, width);
}

GradientView half(const GradientView& rows, int index) {
  if (!rows) return {};
  return {half(rows.view, index), rows.accumulate, true};
}

Tensor gated(std::string_view operation, const Tensor& x, kernels::GatedKind kind) {
  const auto& context = common_context(operation, {&x});
  check_rows(operation, "x", x);
  Shape shape = x.shape();
  require(shape.back() % 2 == 0,
          "{}: the last dim of x holds gate and up side by side and must be even, got shape {}",
          operation, x.shape());
  shape[shape.size() - 1] /= 2;

  Tensor y = Tensor::empty(context, shape, x.dtype(), MemoryCategory::Activations, operation);
  const auto forward = [kind](std::span<const Tensor> in, const TensorView& to) {
    const TensorView rows = as_rows(in[0].view());
    kernels::gated_forward(*in[0].context(), {half(rows, 0), half(rows, 1), as_rows(to), kind});
  };
  forward({&x, 1}, y.view());

  if (autograd::needs_grad({&x})) {
    const auto backward = [saved = autograd::SavedTensor(x), operation, kind](
                              const Tensor& grad_y, autograd::InputGradients& into) {
      const TensorView kept = as_rows(saved.get(operation).view());
      const GradientView grad = as_rows(into.target(0));
      kernels::gated_backward(*grad_y.context(),
                              {half(kept, 0), half(kept, 1), as_rows(grad_y.view()), half(grad, 0),
                               half(grad, 1), kind});
    };
    autograd::record(operation, y, {x}, backward);
    autograd::recompute_if_cheap(y, operation, {x}, forward);
  }
  return y;
}

}  // namespace

Tensor swiglu(const Tensor& x) { return gated("swiglu", x, kernels::GatedKind::SwiGlu); }

Tensor geglu(const Tensor& x) { return gated("geglu", x, kernels::GatedKind::GeGlu); }

}  // namespace tessera::ops
