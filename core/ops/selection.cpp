#include "core/ops/selection.h"

#include <cmath>
#include <limits>

#include "core/ops/broadcast.h"
#include "core/ops/checks.h"
#include "kernels/selection.h"
#include "kernels/strided.h"

namespace tessera::ops {
namespace {

using autograd::InputGradients;
using autograd::SavedTensor;
using kernels::CompareKind;

void check_selected(std::string_view operation, std::string_view argument, const Tensor& tensor) {
  if (tensor.dtype() != DType::I32) check_computes(operation, argument, tensor);
}

// The number must be one of i32 if it stands for an element of that dtype.
void check_number(std::string_view operation, std::string_view argument, double number,
                  DType dtype) {
  using Limits = std::numeric_limits<std::int32_t>;
  require(dtype != DType::I32 ||
              (number >= Limits::min() && number <= Limits::max() && number == std::trunc(number)),
          "{}: {} must be an integer of 32 bits, as the tensor is i32, got {}", operation, argument,
          number);
}

// Gradient of input i: grad where the condition equals `wanted`, else 0, summed over the dims that
// were repeated.
void pass_selected(InputGradients& into, int i, const Shape& shape, const Tensor& condition,
                   const Tensor& grad, bool wanted) {
  Context& context = *grad.context();
  const TensorView choice = broadcast_view(condition, grad.shape());
  const auto select = [&](const GradientView& to) {
    kernels::where(context, wanted ? kernels::Where{choice, grad.view(), {}, to}
                                   : kernels::Where{choice, {}, grad.view(), to});
  };
  if (shape == grad.shape()) return select(into.target(i));
  const Tensor part = Tensor::empty(grad.context(), grad.shape(), grad.dtype(),
                                    MemoryCategory::Workspace, "where.grad");
  select({part.view(), false, true});
  pass_sum(into, i, shape, part);
}

}  // namespace

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  const auto& context = common_context("where", {&condition, &a, &b});
  check_dtype("where", "condition", condition, DType::I32);
  check_selected("where", "a", a);
  check_dtype("where", "b", b, a.dtype());
  const Shape shape = broadcast_shape("where", "condition and (a, b)", condition.shape(),
                                      broadcast_shape("where", "a and b", a.shape(), b.shape()));
  Tensor y = Tensor::empty(context, shape, a.dtype(), MemoryCategory::Activations, "where");
  kernels::where(*context, {broadcast_view(condition, shape),
                            broadcast_view(a, shape),
                            broadcast_view(b, shape),
                            {y.view(), false, true}});

  if (autograd::needs_grad({&a, &b})) {
    const auto backward = [saved = SavedTensor(condition), of_a = a.requires_grad(),
                           of_b = b.requires_grad(), a_shape = a.shape(),
                           b_shape = b.shape()](const Tensor& grad_y, InputGradients& into) {
      const Tensor& choice = saved.get("where");
      if (of_a) pass_selected(into, 0, a_shape, choice, grad_y, true);
      if (of_b) pass_selected(into, 1, b_shape, choice, grad_y, false);
    };
    autograd::record("where", y, {a, b}, backward);
  }
  return y;
}

Tensor masked_fill(const Tensor& x, const Tensor& mask, double value) {
  constexpr std::string_view kName = "masked_fill";
  const auto& context = common_context(kName, {&x, &mask});
  check_selected(kName, "x", x);
  check_dtype(kName, "mask", mask, DType::I32);
  require(broadcast_shape(kName, "x and mask", x.shape(), mask.shape()) == x.shape(),
          "{}: mask of shape {} does not broadcast to the shape of x, {}", kName, mask.shape(),
          x.shape());
  check_number(kName, "value", value, x.dtype());
  Tensor y = Tensor::empty(context, x.shape(), x.dtype(), MemoryCategory::Activations, kName);
  kernels::where(*context,
                 {broadcast_view(mask, x.shape()), {}, x.view(), {y.view(), false, true}, value});

  if (autograd::needs_grad({&x})) {
    const auto backward = [saved = SavedTensor(mask), shape = x.shape()](const Tensor& grad_y,
                                                                         InputGradients& into) {
      pass_selected(into, 0, shape, saved.get("masked_fill"), grad_y, false);
    };
    autograd::record(kName, y, {x}, backward);
  }
  return y;
}

namespace {

Tensor compare(std::string_view operation, const Tensor& a, const Tensor& b, CompareKind kind,
               bool swapped = false) {
  const auto& context = common_context(operation, {&a, &b});
  check_selected(operation, "a", a);
  check_dtype(operation, "b", b, a.dtype());
  const Shape shape = broadcast_shape(operation, "a and b", a.shape(), b.shape());
  Tensor y = Tensor::empty(context, shape, DType::I32, MemoryCategory::Activations, operation);
  kernels::compare(
      *context, {broadcast_view(a, shape), broadcast_view(b, shape), y.view(), kind, 0.0, swapped});
  return y;
}

Tensor compare(std::string_view operation, const Tensor& a, double b, CompareKind kind,
               bool swapped = false) {
  const auto& context = common_context(operation, {&a});
  check_selected(operation, "a", a);
  check_number(operation, "b", b, a.dtype());
  Tensor y = Tensor::empty(context, a.shape(), DType::I32, MemoryCategory::Activations, operation);
  kernels::compare(*context, {a.view(), {}, y.view(), kind, b, swapped});
  return y;
}

}  // namespace

Tensor equal(const Tensor& a, const Tensor& b) {
  return compare("equal", a, b, CompareKind::Equal);
}
Tensor equal(const Tensor& a, double b) { return compare("equal", a, b, CompareKind::Equal); }

Tensor not_equal(const Tensor& a, const Tensor& b) {
  return compare("not_equal", a, b, CompareKind::NotEqual);
}
Tensor not_equal(const Tensor& a, double b) {
  return compare("not_equal", a, b, CompareKind::NotEqual);
}

Tensor less(const Tensor& a, const Tensor& b) { return compare("less", a, b, CompareKind::Less); }
Tensor less(const Tensor& a, double b) { return compare("less", a, b, CompareKind::Less); }

Tensor less_equal(const Tensor& a, const Tensor& b) {
  return compare("less_equal", a, b, CompareKind::LessEqual);
}
Tensor less_equal(const Tensor& a, double b) {
  return compare("less_equal", a, b, CompareKind::LessEqual);
}

Tensor greater(const Tensor& a, const Tensor& b) {
  return compare("greater", a, b, CompareKind::Less, true);
}
Tensor greater(const Tensor& a, double b) {
  return compare("greater", a, b, CompareKind::Less, true);
}

Tensor greater_equal(const Tensor& a, const Tensor& b) {
  return compare("greater_equal", a, b, CompareKind::LessEqual, true);
}
Tensor greater_equal(const Tensor& a, double b) {
  return compare("greater_equal", a, b, CompareKind::LessEqual, true);
}

}  // namespace tessera::ops
