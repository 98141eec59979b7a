#include "core/ops/shape.h"

#include <numeric>
#include <utility>

#include "core/ops/broadcast.h"
#include "core/ops/checks.h"
#include "kernels/elementwise.h"
#include "kernels/gather.h"
#include "kernels/unary.h"

namespace tessera::ops {
namespace {

using autograd::InputGradients;

void check_moves(std::string_view operation, std::string_view argument, const Tensor& tensor) {
  if (tensor.dtype() == DType::I32 || tensor.dtype() == DType::I64) return;
  require(
      tensor.dtype() == DType::F64 || tensor.dtype() == DType::F32 || tensor.dtype() == DType::BF16,
      "{}: {} must be f64, f32, bf16, i32 or i64, got {}", operation, argument, tensor.dtype());
}

void copy_view(Context& context, const TensorView& from, const GradientView& to) {
  kernels::unary(context, {from, to, kernels::UnaryKind::Copy});
}

Tensor copy_of(std::string_view operation, const Tensor& x, const TensorView& view) {
  Tensor y =
      Tensor::empty(x.context(), view.shape, x.dtype(), MemoryCategory::Activations, operation);
  copy_view(*x.context(), view, {y.view(), false, true});
  return y;
}

TensorView exchanged(TensorView view, int dim0, int dim1) {
  std::swap(view.shape[dim0], view.shape[dim1]);
  std::swap(view.strides[dim0], view.strides[dim1]);
  return view;
}

}  // namespace

Tensor transpose(const Tensor& x, int dim0, int dim1) {
  common_context("transpose", {&x});
  check_moves("transpose", "x", x);
  const int first = check_dim("transpose", dim0, x.shape());
  const int second = check_dim("transpose", dim1, x.shape());
  Tensor y = copy_of("transpose", x, exchanged(x.view(), first, second));

  if (autograd::needs_grad({&x})) {
    const auto backward = [first, second](const Tensor& grad_y, InputGradients& into) {
      copy_view(*grad_y.context(), exchanged(grad_y.view(), first, second), into.target(0));
    };
    autograd::record("transpose", y, {x}, backward);
  }
  return y;
}

Tensor broadcast_to(const Tensor& x, const Shape& shape) {
  common_context("broadcast_to", {&x});
  check_moves("broadcast_to", "x", x);
  require(broadcast_shape("broadcast_to", "x and the result", x.shape(), shape) == shape,
          "broadcast_to: x of shape {} does not broadcast to {}", x.shape(), shape);
  Tensor y = copy_of("broadcast_to", x, broadcast_view(x, shape));

  if (autograd::needs_grad({&x})) {
    const auto backward = [before = x.shape()](const Tensor& grad_y, InputGradients& into) {
      pass_sum(into, 0, before, grad_y);
    };
    autograd::record("broadcast_to", y, {x}, backward);
  }
  return y;
}

Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end) {
  common_context("slice", {&x});
  check_moves("slice", "x", x);
  dim = check_dim("slice", dim, x.shape());
  require(0 <= begin && begin <= end && end <= x.dim(dim),
          "slice: elements [{}, {}) are not in dim {} of x of shape {}", begin, end, dim,
          x.shape());
  Tensor y = copy_of("slice", x, x.view().narrow(dim, begin, end - begin));

  if (autograd::needs_grad({&x})) {
    const auto backward = [dim, begin, count = end - begin](const Tensor& grad_y,
                                                            InputGradients& into) {
      const GradientView to = into.target(0);
      if (!to) return;
      if (!to.accumulate) kernels::fill(*grad_y.context(), to.view, 0.0);
      copy_view(*grad_y.context(), grad_y.view(),
                {to.view.narrow(dim, begin, count), to.accumulate, true});
    };
    autograd::record("slice", y, {x}, backward);
  }
  return y;
}

std::vector<Tensor> split(const Tensor& x, const std::vector<std::int64_t>& sizes, int dim) {
  dim = check_dim("split", dim, x.shape());
  const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  for (const std::int64_t size : sizes)
    require(size >= 0, "split: sizes must not be negative, got {}", size);
  require(total == x.dim(dim), "split: sizes add up to {}, dim {} of x of shape {} is {}", total,
          dim, x.shape(), x.dim(dim));
  std::vector<Tensor> parts;
  std::int64_t begin = 0;
  for (const std::int64_t size : sizes) {
    parts.push_back(slice(x, dim, begin, begin + size));
    begin += size;
  }
  return parts;
}

Tensor concat(const std::vector<Tensor>& tensors, int dim) {
  require(!tensors.empty(), "concat: needs tensors, got none");
  const Tensor& first = tensors.front();
  const auto& context = first.context();
  check_moves("concat", "tensor 0", first);
  dim = check_dim("concat", dim, first.shape());
  Shape shape = first.shape();
  shape[dim] = 0;
  bool needs_grad = false;
  std::vector<std::int64_t> begins;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& part = tensors[i];
    common_context("concat", {&first, &part});
    check_dtype("concat", fmt::format("tensor {}", i), part, first.dtype());
    Shape expected = first.shape();
    if (part.shape().size() == expected.size()) expected[dim] = part.dim(dim);
    require(part.shape() == expected,
            "concat: tensor {} of shape {} does not fit tensor 0 of shape {}: only sizes of dim {} "
            "may differ",
            i, part.shape(), first.shape(), dim);
    begins.push_back(shape[dim]);
    shape[dim] += part.dim(dim);
    needs_grad = needs_grad || autograd::needs_grad({&part});
  }

  Tensor y = Tensor::empty(context, shape, first.dtype(), MemoryCategory::Activations, "concat");
  for (std::size_t i = 0; i < tensors.size(); ++i)
    copy_view(*context, tensors[i].view(),
              {y.view().narrow(dim, begins[i], tensors[i].dim(dim)), false, true});

  if (needs_grad) {
    const auto backward = [dim, begins, end = shape[dim]](const Tensor& grad_y,
                                                          InputGradients& into) {
      for (std::size_t i = 0; i < begins.size(); ++i) {
        const std::int64_t next = i + 1 < begins.size() ? begins[i + 1] : end;
        copy_view(*grad_y.context(), grad_y.view().narrow(dim, begins[i], next - begins[i]),
                  into.target(static_cast<int>(i)));
      }
    };
    autograd::record("concat", y, tensors, backward);
  }
  return y;
}

namespace {

// Other devices give NaN, because a check would have to wait for them.
void check_indices(const Tensor& index, std::int64_t size) {
  if (index.device().type != DeviceType::CPU) return;
  const std::int32_t* const values = index.data<std::int32_t>();
  for (std::int64_t i = 0; i < index.numel(); ++i)
    require(values[i] >= 0 && values[i] < size,
            "gather: index {} at element {} is not in [0, {}), the dim of x", values[i], i, size);
}

}  // namespace

Tensor gather(const Tensor& x, int dim, const Tensor& index) {
  const auto& context = common_context("gather", {&x, &index});
  check_computes("gather", "x", x);
  check_dtype("gather", "index", index, DType::I32);
  check_contiguous("gather", "index", index);
  dim = check_dim("gather", dim, x.shape());
  bool fits = index.shape().size() == x.shape().size();
  for (int d = 0; fits && d < x.shape().size(); ++d) fits = d == dim || index.dim(d) <= x.dim(d);
  require(fits,
          "gather: index must have the dims of x, of at most its sizes except for dim {}, got x {} "
          "and index {}",
          dim, x.shape(), index.shape());
  check_indices(index, x.dim(dim));
  Tensor y =
      Tensor::empty(context, index.shape(), x.dtype(), MemoryCategory::Activations, "gather");
  kernels::gather(*context, {x.view(), index.view(), y.view(), dim});

  if (autograd::needs_grad({&x})) {
    const auto backward = [dim, saved = autograd::SavedTensor(index)](const Tensor& grad_y,
                                                                      InputGradients& into) {
      const GradientView to = into.weight_target(0);
      if (!to) return;
      if (!to.accumulate) kernels::fill(*grad_y.context(), to.view, 0.0);
      kernels::scatter_add(*grad_y.context(),
                           {grad_y.view(), saved.get("gather").view(), to.view, dim});
    };
    autograd::record("gather", y, {x}, backward);
  }
  return y;
}

}  // namespace tessera::ops
