#include "core/ops/view.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"

namespace tessera::ops {

Tensor reshape(const Tensor& x, const Shape& shape) {
  common_context("reshape", {&x}, false);
  check_contiguous("reshape", "x", x);
  require(numel(shape) == x.numel(), "reshape: x of shape {} has {} elements, shape {} has {}",
          x.shape(), x.numel(), shape, numel(shape));

  Tensor y = x.alias(shape, contiguous_strides(shape), 0);

  if (autograd::needs_grad({&x})) {
    const auto backward = [before = x.shape()](const Tensor& grad_y,
                                               autograd::InputGradients& into) {
      into.pass(0, grad_y.alias(before, contiguous_strides(before), 0));
    };
    autograd::record("reshape", y, {x}, backward);
  }
  return y;
}

}  // namespace tessera::ops
