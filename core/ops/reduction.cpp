#include "core/ops/reduction.h"

#include <limits>

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/gather.h"
#include "kernels/reduction.h"
#include "kernels/strided.h"
#include "kernels/unary.h"

namespace tessera::ops {
namespace {

// The shape with size 1 in `dim`, or in all dims if dim < 0.
Shape with_ones(Shape shape, int dim) {
  for (int d = 0; d < shape.size(); ++d)
    if (dim < 0 || d == dim) shape[d] = 1;
  return shape;
}

Shape without(const Shape& shape, int dim) {
  Shape rest;
  for (int d = 0; d < shape.size(); ++d)
    if (d != dim) rest.push_back(shape[d]);
  return rest;
}

Tensor new_result(std::string_view operation, const Tensor& x, const Shape& shape, DType dtype) {
  return Tensor::empty(x.context(), shape, dtype, MemoryCategory::Activations, operation);
}

TensorView reshaped(const Tensor& tensor, const Shape& shape) {
  const TensorView view = tensor.view();
  return dense_view(view.data, view.dtype, shape, view.device);
}

// to = scale * sum of x over `dim`, or over all dims if dim < 0. @param ones  shape of x after that
void sum_into(const Tensor& x, const Tensor& to, const Shape& ones, int dim, double scale) {
  Context& context = *x.context();
  if (dim >= 0 || !x.is_contiguous()) {
    kernels::sum_to(context, {x.view(), {reshaped(to, ones), false, true}, scale});
    return;
  }
  const DType accumulator = kernels::accumulator_dtype(x.dtype());
  Tensor total = to;
  if (to.dtype() != accumulator)
    total = Tensor::empty(x.context(), {}, accumulator, MemoryCategory::Workspace, "sum");
  kernels::sum(context, x.view(), {total.view(), false, true}, scale);
  if (to.dtype() != accumulator) kernels::cast(context, total.view(), {to.view(), false, true});
}

// @param dim  negative: all
Tensor scaled_sum(std::string_view operation, const Tensor& x, int dim, const Shape& shape,
                  double scale) {
  const Shape ones = with_ones(x.shape(), dim);
  Tensor y = new_result(operation, x, shape, x.dtype());
  sum_into(x, y, ones, dim, scale);

  if (autograd::needs_grad({&x})) {
    const auto backward = [ones, before = x.shape(), scale](const Tensor& grad_y,
                                                            autograd::InputGradients& into) {
      kernels::unary(*grad_y.context(), {kernels::broadcast(reshaped(grad_y, ones), before),
                                         into.target(0), kernels::UnaryKind::Multiply, scale});
    };
    autograd::record(operation, y, {x}, backward);
  }
  return y;
}

Tensor sum_of(std::string_view operation, const Tensor& x, bool averages) {
  common_context(operation, {&x});
  check_computes(operation, "x", x);
  return scaled_sum(operation, x, -1, {}, averages ? 1.0 / static_cast<double>(x.numel()) : 1.0);
}

Tensor sum_of(std::string_view operation, const Tensor& x, int dim, bool keepdim, bool averages) {
  common_context(operation, {&x});
  check_computes(operation, "x", x);
  dim = check_dim(operation, dim, x.shape());
  const Shape shape = keepdim ? with_ones(x.shape(), dim) : without(x.shape(), dim);
  return scaled_sum(operation, x, dim, shape,
                    averages ? 1.0 / static_cast<double>(x.dim(dim)) : 1.0);
}

/// x as [outer, count, inner], to look for the largest elements along the middle dim.
struct Search {
  Shape view;    ///< of x
  Shape result;  ///< shape of the result
};

Search search_all(std::string_view operation, const Tensor& x) {
  common_context(operation, {&x});
  check_computes(operation, "x", x);
  check_contiguous(operation, "x", x);
  return {{1, x.numel(), 1}, {}};
}

Search search_along(std::string_view operation, const Tensor& x, int dim, bool keepdim) {
  common_context(operation, {&x});
  check_computes(operation, "x", x);
  check_contiguous(operation, "x", x);
  dim = check_dim(operation, dim, x.shape());
  std::int64_t outer = 1, inner = 1;
  for (int d = 0; d < dim; ++d) outer *= x.dim(d);
  for (int d = dim + 1; d < x.shape().size(); ++d) inner *= x.dim(d);
  return {{outer, x.dim(dim), inner},
          keepdim ? with_ones(x.shape(), dim) : without(x.shape(), dim)};
}

void check_count(std::string_view operation, const Tensor& x, std::int64_t count) {
  require(count > 0, "{}: x of shape {} has no elements to choose from", operation, x.shape());
  require(count <= std::numeric_limits<std::int32_t>::max(),
          "{}: i32 cannot number the {} elements of x of shape {}", operation, count, x.shape());
}

Tensor largest(std::string_view operation, const Tensor& x, const Search& search) {
  check_count(operation, x, search.view[1]);
  Tensor y = new_result(operation, x, search.result, x.dtype());
  const bool recorded = autograd::needs_grad({&x});
  Tensor places;
  if (recorded) places = new_result("max.places", x, search.result, DType::I32);
  kernels::max_along(*x.context(),
                     {reshaped(x, search.view), y.view(), recorded ? places.view() : TensorView{}});

  if (recorded) {
    const auto backward = [places, view = search.view](const Tensor& grad_y,
                                                       autograd::InputGradients& into) {
      Context& context = *grad_y.context();
      const GradientView to = into.weight_target(0);
      if (!to) return;
      if (!to.accumulate) kernels::fill(context, to.view, 0.0);
      const Shape ones{view[0], 1, view[2]};
      kernels::scatter_add(context,
                           {reshaped(grad_y, ones), reshaped(places, ones),
                            dense_view(to.view.data, to.view.dtype, view, to.view.device), 1});
    };
    autograd::record(operation, y, {x}, backward);
  }
  return y;
}

Tensor place_of_largest(const Tensor& x, const Search& search) {
  check_count("argmax", x, search.view[1]);
  const Tensor places = new_result("argmax", x, search.result, DType::I32);
  kernels::max_along(*x.context(), {reshaped(x, search.view), {}, places.view()});
  return places;
}

}  // namespace

Tensor sum(const Tensor& x) { return sum_of("sum", x, false); }
Tensor sum(const Tensor& x, int dim, bool keepdim) { return sum_of("sum", x, dim, keepdim, false); }

Tensor mean(const Tensor& x) { return sum_of("mean", x, true); }
Tensor mean(const Tensor& x, int dim, bool keepdim) {
  return sum_of("mean", x, dim, keepdim, true);
}

Tensor max(const Tensor& x) { return largest("max", x, search_all("max", x)); }
Tensor max(const Tensor& x, int dim, bool keepdim) {
  return largest("max", x, search_along("max", x, dim, keepdim));
}

Tensor argmax(const Tensor& x) { return place_of_largest(x, search_all("argmax", x)); }
Tensor argmax(const Tensor& x, int dim, bool keepdim) {
  return place_of_largest(x, search_along("argmax", x, dim, keepdim));
}

}  // namespace tessera::ops
