#include "core/ops/elementwise.h"

#include "core/autograd/autograd.h"
#include "core/ops/broadcast.h"
#include "core/ops/checks.h"
#include "kernels/binary.h"
#include "kernels/dropout.h"
#include "kernels/elementwise.h"
#include "kernels/unary.h"

namespace tessera::ops {

namespace {

using autograd::InputGradients;
using autograd::SavedTensor;
using kernels::BinaryKind;
using kernels::UnaryKind;

Tensor binary(std::string_view operation, BinaryKind kind, const Tensor& a, const Tensor& b) {
  const auto& context = common_context(operation, {&a, &b});
  check_computes(operation, "a", a);
  check_dtype(operation, "b", b, a.dtype());
  const Shape shape = broadcast_shape(operation, "a and b", a.shape(), b.shape());
  Tensor y = Tensor::empty(context, shape, a.dtype(), MemoryCategory::Activations, operation);
  kernels::binary(*context, {broadcast_view(a, shape), broadcast_view(b, shape),
                             GradientView{y.view(), false, true}, kind});
  return y;
}

Tensor unary(std::string_view operation, UnaryKind kind, const Tensor& x, double scalar) {
  const auto& context = common_context(operation, {&x});
  check_computes(operation, "x", x);
  Tensor y = Tensor::empty(context, x.shape(), x.dtype(), MemoryCategory::Activations, operation);
  kernels::unary(*context, {x.view(), {y.view(), false, true}, kind, scalar});
  return y;
}

// kind(grad, other) for the gradient of an input; dense, of grad's shape.
Tensor gradient_term(BinaryKind kind, const Tensor& grad, const Tensor& other) {
  Tensor term = Tensor::empty(grad.context(), grad.shape(), grad.dtype(), MemoryCategory::Workspace,
                              "gradient term");
  kernels::binary(*grad.context(), {grad.view(), broadcast_view(other, grad.shape()),
                                    GradientView{term.view(), false, true}, kind});
  return term;
}

// Gradient of input i: scale * kind(grad, other), summed over the dims that were repeated.
void pass_term(InputGradients& into, int i, const Shape& shape, BinaryKind kind, const Tensor& grad,
               const Tensor& other, double scale = 1.0) {
  if (shape != grad.shape()) {
    pass_sum(into, i, shape, gradient_term(kind, grad, other), scale);
    return;
  }
  kernels::binary(*grad.context(),
                  {grad.view(), broadcast_view(other, shape), into.target(i), kind, scale});
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) {
  Tensor y;
  if (a.shape() == b.shape() && a.is_contiguous() && b.is_contiguous()) {
    const auto& context = common_context("add", {&a, &b}, false);
    check_computes("add", "a", a);
    check_dtype("add", "b", b, a.dtype());
    y = autograd::result(
        context, a.shape(), a.dtype(), "add", {a, b},
        [a, b](const TensorView& to) { kernels::add(*a.context(), a.view(), b.view(), to); },
        autograd::Late::IfAnInputIs);
  } else {
    y = binary("add", BinaryKind::Add, a, b);
  }

  if (autograd::needs_grad({&a, &b})) {
    const auto backward = [a_shape = a.shape(), b_shape = b.shape()](const Tensor& grad_y,
                                                                     InputGradients& into) {
      pass_sum(into, 0, a_shape, grad_y);
      pass_sum(into, 1, b_shape, grad_y);
    };
    autograd::record("add", y, {a, b}, backward);
  }
  return y;
}

Tensor sub(const Tensor& a, const Tensor& b) {
  Tensor y = binary("sub", BinaryKind::Subtract, a, b);

  if (autograd::needs_grad({&a, &b})) {
    const auto backward = [a_shape = a.shape(), b_shape = b.shape()](const Tensor& grad_y,
                                                                     InputGradients& into) {
      pass_sum(into, 0, a_shape, grad_y);
      pass_sum(into, 1, b_shape, grad_y, -1.0);
    };
    autograd::record("sub", y, {a, b}, backward);
  }
  return y;
}

Tensor mul(const Tensor& a, const Tensor& b) {
  Tensor y = binary("mul", BinaryKind::Multiply, a, b);

  if (autograd::needs_grad({&a, &b})) {
    SavedTensor saved_a, saved_b;
    if (b.requires_grad()) saved_a = SavedTensor(a);
    if (a.requires_grad()) saved_b = SavedTensor(b);
    const auto backward = [saved_a, saved_b, a_shape = a.shape(), b_shape = b.shape()](
                              const Tensor& grad_y, InputGradients& into) {
      if (saved_b.defined())
        pass_term(into, 0, a_shape, BinaryKind::Multiply, grad_y, saved_b.get("mul"));
      if (saved_a.defined())
        pass_term(into, 1, b_shape, BinaryKind::Multiply, grad_y, saved_a.get("mul"));
    };
    autograd::record("mul", y, {a, b}, backward);
    if (saved_a.defined() && saved_b.defined())
      autograd::recompute_if_cheap(
          y, "mul", {a, b}, [](std::span<const Tensor> in, const TensorView& to) {
            kernels::binary(*in[0].context(),
                            {broadcast_view(in[0], to.shape), broadcast_view(in[1], to.shape),
                             GradientView{to, false, true}, BinaryKind::Multiply});
          });
  }
  return y;
}

Tensor div(const Tensor& a, const Tensor& b) {
  Tensor y = binary("div", BinaryKind::Divide, a, b);

  if (autograd::needs_grad({&a, &b})) {
    SavedTensor saved_y;
    if (b.requires_grad()) saved_y = SavedTensor(y);
    const auto backward = [saved_b = SavedTensor(b), saved_y, of_a = a.requires_grad(),
                           a_shape = a.shape(),
                           b_shape = b.shape()](const Tensor& grad_y, InputGradients& into) {
      const Tensor& divisor = saved_b.get("div");
      if (of_a) pass_term(into, 0, a_shape, BinaryKind::Divide, grad_y, divisor);
      if (!saved_y.defined()) return;
      const Tensor quotient = gradient_term(BinaryKind::Divide, grad_y, divisor);
      pass_term(into, 1, b_shape, BinaryKind::Multiply, quotient, saved_y.get("div"), -1.0);
    };
    autograd::record("div", y, {a, b}, backward);
  }
  return y;
}

namespace {

// x + b and x - b: the gradient passes through.
Tensor shifted(std::string_view operation, const Tensor& x, double by) {
  Tensor y = unary(operation, UnaryKind::Add, x, by);

  if (autograd::needs_grad({&x})) {
    const auto backward = [](const Tensor& grad_y, InputGradients& into) { into.pass(0, grad_y); };
    autograd::record(operation, y, {x}, backward);
  }
  return y;
}

// Functions whose derivative is `factor`.
Tensor linear_in_x(std::string_view operation, UnaryKind kind, const Tensor& x, double scalar,
                   double factor) {
  Tensor y = unary(operation, kind, x, scalar);

  if (autograd::needs_grad({&x})) {
    const auto backward = [factor](const Tensor& grad_y, InputGradients& into) {
      kernels::cast(*grad_y.context(), grad_y.view(), into.target(0), factor);
    };
    autograd::record(operation, y, {x}, backward);
  }
  return y;
}

}  // namespace

Tensor add(const Tensor& x, double b) { return shifted("add", x, b); }

Tensor sub(const Tensor& x, double b) { return shifted("sub", x, -b); }

Tensor sub(double a, const Tensor& x) {
  return linear_in_x("sub", UnaryKind::SubtractFrom, x, a, -1.0);
}

Tensor mul(const Tensor& x, double b) { return linear_in_x("mul", UnaryKind::Multiply, x, b, b); }

Tensor neg(const Tensor& x) { return linear_in_x("neg", UnaryKind::Multiply, x, -1.0, -1.0); }

Tensor div(const Tensor& x, double b) {
  Tensor y = unary("div", UnaryKind::Divide, x, b);

  if (autograd::needs_grad({&x})) {
    const auto backward = [b](const Tensor& grad_y, InputGradients& into) {
      kernels::unary(*grad_y.context(), {grad_y.view(), into.target(0), UnaryKind::Divide, b});
    };
    autograd::record("div", y, {x}, backward);
  }
  return y;
}

Tensor div(double a, const Tensor& x) {
  Tensor y = unary("div", UnaryKind::DivideInto, x, a);

  if (autograd::needs_grad({&x})) {
    const auto backward = [a, saved = SavedTensor(x)](const Tensor& grad_y, InputGradients& into) {
      kernels::binary(*grad_y.context(), {saved.get("div").view(), grad_y.view(), into.target(0),
                                          BinaryKind::ReciprocalGradient, -a});
    };
    autograd::record("div", y, {x}, backward);
  }
  return y;
}

Tensor cast(const Tensor& x, DType dtype) {
  const auto& context = common_context("cast", {&x});
  check_computes("cast", "x", x);
  check_contiguous("cast", "x", x);
  require(dtype == DType::F64 || dtype == DType::F32 || dtype == DType::BF16,
          "cast: dtype must be f64, f32 or bf16, got {}", dtype);
  if (dtype == x.dtype()) return x;
  Tensor y = Tensor::empty(context, x.shape(), dtype, MemoryCategory::Activations, "cast");
  kernels::cast(*context, x.view(), {y.view(), false, true});

  if (autograd::needs_grad({&x})) {
    const auto backward = [](const Tensor& grad_y, InputGradients& into) {
      kernels::cast(*grad_y.context(), grad_y.view(), into.target(0));
    };
    autograd::record("cast", y, {x}, backward);
  }
  return y;
}

Tensor dropout(const Tensor& x, float p, std::uint64_t place) {
  const auto& context = common_context("dropout", {&x}, false);
  check_computes("dropout", "x", x);
  check_contiguous("dropout", "x", x);
  require(p >= 0.0F && p < 1.0F, "dropout: p must be in [0, 1), got {}", p);
  require(!x.shape().empty(), "dropout: x must have a batch dim, got shape {}", x.shape());
  if (p == 0.0F || x.numel() == 0) return x;

  const RngStep* const rng = context->rng_step();
  const auto sample_elements = static_cast<std::uint64_t>(x.numel() / x.dim(0));
  Tensor y = autograd::result(
      context, x.shape(), x.dtype(), "dropout", {x},
      [=](const TensorView& to) {
        kernels::dropout(*x.context(),
                         {x.view(), {to, false, true}, p, rng, place, sample_elements});
      },
      autograd::Late::IfAnInputIs);

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
