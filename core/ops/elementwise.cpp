#include "core/ops/elementwise.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/dropout.h"
#include "kernels/elementwise.h"

namespace tessera::ops {

Tensor add(const Tensor& a, const Tensor& b) {
  const auto& context = common_context("add", {&a, &b});
  check_computes("add", "a", a);
  check_contiguous("add", "a", a);
  check_dense("add", "b", b, a.dtype(), a.shape());

  Tensor y = Tensor::empty(context, a.shape(), a.dtype(), MemoryCategory::Activations, "add");
  kernels::add(*context, a.view(), b.view(), y.view());

  if (autograd::needs_grad({&a, &b})) {
    autograd::record("add", y, {a, b}, [](const Tensor& grad_y, autograd::InputGradients& into) {
      into.pass(0, grad_y);
      into.pass(1, grad_y);
    });
  }
  return y;
}

Tensor dropout(const Tensor& x, float p, std::uint64_t place) {
  const auto& context = common_context("dropout", {&x});
  check_computes("dropout", "x", x);
  check_contiguous("dropout", "x", x);
  require(p >= 0.0F && p < 1.0F, "dropout: p must be in [0, 1), got {}", p);
  require(!x.shape().empty(), "dropout: x must have a batch dim, got shape {}", x.shape());
  if (p == 0.0F || x.numel() == 0) return x;

  Tensor y = Tensor::empty(context, x.shape(), x.dtype(), MemoryCategory::Activations, "dropout");
  const RngStep* const rng = context->rng_step();
  const auto sample_elements = static_cast<std::uint64_t>(x.numel() / x.dim(0));
  kernels::dropout(*context, {x.view(), {y.view(), false, true}, p, rng, place, sample_elements});

  if (autograd::needs_grad({&x})) {
    const auto backward = [=](const Tensor& grad_y, autograd::InputGradients& into) {
      kernels::dropout(*grad_y.context(),
                       {grad_y.view(), into.target(0), p, rng, place, sample_elements});
    };
    autograd::record("dropout", y, {x}, backward);
  }
  return y;
}

}  // namespace tessera::ops
