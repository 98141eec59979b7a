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
  }
  return y;
}

}  // namespace tessera::ops
