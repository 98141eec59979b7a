#pragma once

#include <string_view>

#include "core/tensor.h"

namespace tessera::ops {

// Checks shared by operations. They throw InvalidArgument naming operation, argument and values.

/// The dtype is f64, f32 or bf16.
void check_computes(std::string_view operation, std::string_view argument, const Tensor& tensor);
void check_dtype(std::string_view operation, std::string_view argument, const Tensor& tensor,
                 DType expected);
void check_shape(std::string_view operation, std::string_view argument, const Tensor& tensor,
                 const Shape& expected);
void check_contiguous(std::string_view operation, std::string_view argument, const Tensor& tensor);
/// Shape, dtype and contiguity.
void check_dense(std::string_view operation, std::string_view argument, const Tensor& tensor,
                 DType dtype, const Shape& shape);
/// @param meaning  names of the dims, for the message: "[B, T, C]"
void check_dims(std::string_view operation, std::string_view argument, const Tensor& tensor,
                int dims, std::string_view meaning);
/// At least one dim, contiguous, f64, f32 or bf16.
void check_rows(std::string_view operation, std::string_view argument, const Tensor& tensor);

/// A dim of `shape` counted from the first one, given one that may be negative: -1 is the last.
int check_dim(std::string_view operation, int dim, const Shape& shape);

/// Product of all sizes but the last.
std::int64_t row_count(const Shape& shape);
/// A contiguous view as [rows, size of the last dim].
TensorView as_rows(const TensorView& view);
GradientView as_rows(const GradientView& place);

}  // namespace tessera::ops
