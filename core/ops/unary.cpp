#include "core/ops/unary.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/binary.h"
#include "kernels/unary.h"

namespace tessera::ops {
namespace {

using kernels::BinaryKind;
using kernels::UnaryKind;

/// The gradient of x: scale * kind(kept, grad_y), or kind(grad_y, kept) if grad_first.
struct Gradient {
  enum Keeps { Input, Result } keeps;
  BinaryKind kind;
  bool grad_first = false;
  double scale = 1.0;
};

Tensor function_of(std::string_view operation, UnaryKind kind, const Tensor& x,
                   const Gradient& rule) {
  const auto& context = common_context(operation, {&x});
  check_computes(operation, "x", x);
  Tensor y = Tensor::empty(context, x.shape(), x.dtype(), MemoryCategory::Activations, operation);
  const auto forward = [kind](std::span<const Tensor> in, const TensorView& to) {
    kernels::unary(*in[0].context(), {in[0].view(), {to, false, true}, kind});
  };
  forward({&x, 1}, y.view());

  if (autograd::needs_grad({&x})) {
    if (rule.keeps == Gradient::Input) autograd::recompute_if_cheap(y, operation, {x}, forward);
    const auto backward = [=, saved = autograd::SavedTensor(rule.keeps == Gradient::Input ? x : y)](
                              const Tensor& grad_y, autograd::InputGradients& into) {
      const TensorView kept = saved.get(operation).view(), grad = grad_y.view();
      kernels::binary(*grad_y.context(),
                      {rule.grad_first ? grad : kept, rule.grad_first ? kept : grad, into.target(0),
                       rule.kind, rule.scale});
    };
    autograd::record(operation, y, {x}, backward);
  }
  return y;
}

}  // namespace

Tensor relu(const Tensor& x) {
  return function_of("relu", UnaryKind::Relu, x, {Gradient::Result, BinaryKind::ReluGradient});
}

Tensor sigmoid(const Tensor& x) {
  return function_of("sigmoid", UnaryKind::Sigmoid, x,
                     {Gradient::Result, BinaryKind::SigmoidGradient});
}

Tensor silu(const Tensor& x) {
  return function_of("silu", UnaryKind::Silu, x, {Gradient::Input, BinaryKind::SiluGradient});
}

Tensor tanh(const Tensor& x) {
  return function_of("tanh", UnaryKind::Tanh, x, {Gradient::Result, BinaryKind::TanhGradient});
}

Tensor exp(const Tensor& x) {
  return function_of("exp", UnaryKind::Exp, x, {Gradient::Result, BinaryKind::Multiply});
}

Tensor log(const Tensor& x) {
  return function_of("log", UnaryKind::Log, x, {Gradient::Input, BinaryKind::Divide, true});
}

Tensor sqrt(const Tensor& x) {
  return function_of("sqrt", UnaryKind::Sqrt, x, {Gradient::Result, BinaryKind::Divide, true, 0.5});
}

}  // namespace tessera::ops
