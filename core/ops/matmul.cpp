#include "core/ops/matmul.h"

#include "core/ops/broadcast.h"
#include "core/ops/checks.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "kernels/strided.h"

namespace tessera::ops {
namespace {

using autograd::InputGradients;
using autograd::SavedTensor;

constexpr std::string_view kMatmul = "matmul";

/// How the product runs: as `count` products of matrices.
struct Plan {
  Shape a, b, y;  ///< batch dims and two dims of the matrix
  Shape batch;    ///< common batch dims
  std::int64_t count = 1;
};

Shape without_matrix(const Shape& shape) {
  return Shape(shape.begin(), static_cast<std::size_t>(shape.size() - 2));
}

Plan make_plan(const Shape& a, const Shape& b) {
  Plan plan{a, b, {}, {}};
  if (b.size() == 2 || numel(without_matrix(b)) == 1) {
    // One matrix b: the rows of all matrices of a are one matrix.
    plan.a = {row_count(a), a.back()};
    plan.b = {b.at(-2), b.back()};
  }
  plan.batch =
      broadcast_shape(kMatmul, "leading dims", without_matrix(plan.a), without_matrix(plan.b));
  plan.y = plan.batch;
  plan.y.push_back(plan.a.at(-2));
  plan.y.push_back(plan.b.back());
  plan.count = numel(plan.batch);
  return plan;
}

/// The matrices of a dense tensor, in the order of the common batch dims.
class Matrices {
 public:
  Matrices(const TensorView& view, const Shape& shape, const Shape& batch)
      : matrix_(dense_view(view.data, view.dtype, {shape.at(-2), shape.back()}, view.device)),
        batch_(batch) {
    const Shape own = without_matrix(shape);
    const TensorView places = dense_view(nullptr, view.dtype, own);
    strides_ = kernels::broadcast(places, batch).strides;
  }
  TensorView operator[](std::int64_t i) const {
    std::int64_t place = 0;
    for (int d = batch_.size() - 1; d >= 0; --d) {
      place += i % batch_[d] * strides_[d];
      i /= batch_[d];
    }
    TensorView matrix = matrix_;
    matrix.data = matrix_.at(place * matrix_.numel());
    return matrix;
  }

 private:
  TensorView matrix_;
  Shape batch_;
  Strides strides_;
};

/// Gradient of a (grad_y b^T) or b (a^T grad_y). @param other  the other factor
void pass_gradient(InputGradients& into, int i, const Plan& plan, const Tensor& grad_y,
                   const Tensor& other) {
  Context& context = *grad_y.context();
  const Shape& shape = i == 0 ? plan.a : plan.b;
  const bool repeats = numel(without_matrix(shape)) != plan.count;
  // Sums over repeated matrices need the precision of the accumulator; a single b may be a weight.
  const bool is_weight = i == 1 && plan.count == 1;
  const GradientView to = repeats || is_weight ? into.weight_target(i) : into.target(i);
  if (!to) return;
  if (repeats && !to.accumulate) kernels::fill(context, to.view, 0.0);
  const Matrices grads(grad_y.view(), plan.y, plan.batch), out(to.view, shape, plan.batch);
  const Matrices others(other.view(), i == 0 ? plan.b : plan.a, plan.batch);
  for (std::int64_t n = 0; n < plan.count; ++n) {
    kernels::Matmul product{grads[n], others[n], out[n], false, true};
    if (i == 1) product = {others[n], grads[n], out[n], true, false};
    product.accumulate = to.accumulate || repeats;
    kernels::matmul(context, product);
  }
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  const auto& context = common_context(kMatmul, {&a, &b});
  check_computes(kMatmul, "a", a);
  check_dtype(kMatmul, "b", b, a.dtype());
  require(a.shape().size() >= 2 && b.shape().size() >= 2 && a.shape().back() == b.dim(-2),
          "matmul: a and b must be [..., M, K] and [..., K, N], got shapes {} and {}", a.shape(),
          b.shape());
  check_contiguous(kMatmul, "a", a);
  check_contiguous(kMatmul, "b", b);
  Shape shape = broadcast_shape(kMatmul, "leading dims", without_matrix(a.shape()),
                                without_matrix(b.shape()));
  shape.push_back(a.dim(-2));
  shape.push_back(b.dim(-1));
  const Plan plan = make_plan(a.shape(), b.shape());

  Tensor y = Tensor::empty(context, shape, a.dtype(), MemoryCategory::Activations, kMatmul);
  const Matrices left(a.view(), plan.a, plan.batch), right(b.view(), plan.b, plan.batch);
  const Matrices out(y.view(), plan.y, plan.batch);
  for (std::int64_t n = 0; n < plan.count; ++n)
    kernels::matmul(*context, {left[n], right[n], out[n]});

  if (autograd::needs_grad({&a, &b})) {
    SavedTensor saved_a, saved_b;
    if (b.requires_grad()) saved_a = SavedTensor(a);
    if (a.requires_grad()) saved_b = SavedTensor(b);
    const auto backward = [plan, saved_a, saved_b](const Tensor& grad_y, InputGradients& into) {
      if (saved_b.defined()) pass_gradient(into, 0, plan, grad_y, saved_b.get(kMatmul));
      if (saved_a.defined()) pass_gradient(into, 1, plan, grad_y, saved_a.get(kMatmul));
    };
    autograd::record(kMatmul, y, {a, b}, backward);
  }
  return y;
}

}  // namespace tessera::ops
