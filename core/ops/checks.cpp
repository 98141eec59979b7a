#include "core/ops/checks.h"

namespace tessera::ops {

void check_computes(std::string_view operation, std::string_view argument, const Tensor& tensor) {
  const DType dtype = tensor.dtype();
  require(dtype == DType::F64 || dtype == DType::F32 || dtype == DType::BF16,
          "{}: {} must be f64, f32 or bf16, got {}", operation, argument, dtype);
}

void check_dtype(std::string_view operation, std::string_view argument, const Tensor& tensor,
                 DType expected) {
  const bool converts = is_floating(expected) && is_floating(tensor.dtype());
  require(tensor.dtype() == expected, "{}: {} must have dtype {}, got {}{}", operation, argument,
          expected, tensor.dtype(), converts ? "; convert it with ops::cast" : "");
}

void check_shape(std::string_view operation, std::string_view argument, const Tensor& tensor,
                 const Shape& expected) {
  require(tensor.shape() == expected, "{}: {} must have shape {}, got {}", operation, argument,
          expected, tensor.shape());
}

void check_contiguous(std::string_view operation, std::string_view argument, const Tensor& tensor) {
  require(tensor.is_contiguous(), "{}: {} must be contiguous, got shape {} with strides {}",
          operation, argument, tensor.shape(), tensor.strides());
}

void check_dense(std::string_view operation, std::string_view argument, const Tensor& tensor,
                 DType dtype, const Shape& shape) {
  check_shape(operation, argument, tensor, shape);
  check_dtype(operation, argument, tensor, dtype);
  check_contiguous(operation, argument, tensor);
}

void check_dims(std::string_view operation, std::string_view argument, const Tensor& tensor,
                int dims, std::string_view meaning) {
  require(tensor.shape().size() == dims, "{}: {} must be {}, got shape {}", operation, argument,
          meaning, tensor.shape());
}

void check_rows(std::string_view operation, std::string_view argument, const Tensor& tensor) {
  require(!tensor.shape().empty(), "{}: {} must have at least one dim, got shape {}", operation,
          argument, tensor.shape());
  check_computes(operation, argument, tensor);
  check_contiguous(operation, argument, tensor);
}

int check_dim(std::string_view operation, int dim, const Shape& shape) {
  const int index = dim < 0 ? dim + shape.size() : dim;
  require(index >= 0 && index < shape.size(), "{}: dim {} is out of range for shape {}", operation,
          dim, shape);
  return index;
}

std::int64_t row_count(const Shape& shape) {
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  return rows;
}

TensorView as_rows(const TensorView& view) {
  return dense_view(view.data, view.dtype, {row_count(view.shape), view.shape.back()}, view.device);
}

GradientView as_rows(const GradientView& place) {
  if (!place) return {};
  return {as_rows(place.view), place.accumulate, true};
}

}  // namespace tessera::ops
