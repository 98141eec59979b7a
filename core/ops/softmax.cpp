#include "core/ops/softmax.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/softmax.h"

namespace tessera::ops {
namespace {

Tensor softmax_of(std::string_view operation, const Tensor& x, bool log) {
  const auto& context = common_context(operation, {&x});
  check_rows(operation, "x", x);
  Tensor y = Tensor::empty(context, x.shape(), x.dtype(), MemoryCategory::Activations, operation);
  kernels::softmax_forward(*context, {as_rows(x.view()), as_rows(y.view()), log});

  if (autograd::needs_grad({&x})) {
    const auto backward = [operation, log, saved = autograd::SavedTensor(y)](
                              const Tensor& grad_y, autograd::InputGradients& into) {
      kernels::softmax_backward(*grad_y.context(),
                                {as_rows(saved.get(operation).view()), as_rows(grad_y.view()),
                                 as_rows(into.target(0)), log});
    };
    autograd::record(operation, y, {x}, backward);
  }
  return y;
}

}  // namespace

Tensor softmax(const Tensor& x) { return softmax_of("softmax", x, false); }

Tensor log_softmax(const Tensor& x) { return softmax_of("log_softmax", x, true); }

}  // namespace tessera::ops
