#include "core/ops/broadcast.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/reduction.h"
#include "kernels/strided.h"

namespace tessera::ops {
namespace {

// The shape with dims of size 1 in front.
Shape with_leading_dims(const Shape& shape, int dims) {
  Shape wide;
  for (int d = shape.size(); d < dims; ++d) wide.push_back(1);
  for (const std::int64_t size : shape) wide.push_back(size);
  return wide;
}

}  // namespace

Shape broadcast_shape(std::string_view operation, std::string_view names, const Shape& a,
                      const Shape& b) {
  const int dims = std::max(a.size(), b.size());
  const Shape left = with_leading_dims(a, dims), right = with_leading_dims(b, dims);
  Shape shape = left;
  for (int d = 0; d < dims; ++d) {
    require(left[d] == right[d] || left[d] == 1 || right[d] == 1,
            "{}: {} of shapes {} and {} cannot be broadcast, as sizes {} and {} differ and neither "
            "is 1",
            operation, names, a, b, left[d], right[d]);
    if (left[d] == 1) shape[d] = right[d];
  }
  return shape;
}

TensorView broadcast_view(const Tensor& x, const Shape& shape) {
  return kernels::broadcast(x.view(), shape);
}

void pass_sum(autograd::InputGradients& into, int i, const Shape& shape, const Tensor& grad,
              double scale) {
  Context& context = *grad.context();
  if (shape == grad.shape()) {
    if (scale == 1.0)
      into.pass(i, grad);
    else
      kernels::cast(context, grad.view(), into.target(i), scale);
    return;
  }
  GradientView to = into.weight_target(i);
  if (!to) return;
  to.view = kernels::broadcast(to.view, with_leading_dims(shape, grad.shape().size()));
  kernels::sum_to(context, {grad.view(), to, scale});
}

}  // namespace tessera::ops
