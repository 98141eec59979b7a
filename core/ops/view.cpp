#include "core/ops/view.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/elementwise.h"

namespace tessera::ops {

Tensor reshape(const Tensor& x, const Shape& shape) {
  common_context("reshape", {&x});
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

namespace {

// Rows [begin, begin + length) of a contiguous view.
TensorView rows_of(const TensorView& view, std::int64_t begin, std::int64_t length) {
  TensorView part = view;
  part.shape[0] = length;
  if (part.data != nullptr)
    part.data = static_cast<std::byte*>(part.data) +
                static_cast<std::size_t>(begin * view.strides[0]) * dtype_size(view.dtype);
  return part;
}

}  // namespace

Tensor narrow_rows(const Tensor& x, std::int64_t begin, std::int64_t length) {
  common_context("narrow_rows", {&x});
  require(!x.shape().empty(), "narrow_rows: x must have at least one dim, got shape {}", x.shape());
  check_contiguous("narrow_rows", "x", x);
  const std::int64_t rows = x.dim(0);
  require(begin >= 0 && length >= 0 && begin <= rows && length <= rows - begin,
          "narrow_rows: rows [{}, {} + {}) are out of range for x of shape {}", begin, begin,
          length, x.shape());

  Shape shape = x.shape();
  shape[0] = length;
  Tensor y = x.alias(shape, x.strides(), begin * x.strides()[0]);

  if (autograd::needs_grad({&x})) {
    check_computes("narrow_rows", "x", x);
    const auto backward = [begin, length, rows](const Tensor& grad_y,
                                                autograd::InputGradients& into) {
      const GradientView place = into.target(0);
      if (!place) return;
      Context& context = *grad_y.context();
      const std::int64_t end = begin + length;
      if (!place.accumulate) {
        kernels::fill(context, rows_of(place.view, 0, begin), 0.0);
        kernels::fill(context, rows_of(place.view, end, rows - end), 0.0);
      }
      kernels::cast(context, grad_y.view(),
                    {rows_of(place.view, begin, length), place.accumulate, true});
    };
    autograd::record("narrow_rows", y, {x}, backward);
  }
  return y;
}

}  // namespace tessera::ops
