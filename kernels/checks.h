#pragma once

#include "kernels/dispatch.h"

namespace tessera::kernels {

/// @throws Unsupported unless the dtype is f64, f32 or bf16
inline void check_computing_dtype(std::string_view kernel, std::string_view argument,
                                  const TensorView& view) {
  require<Unsupported>(
      view.dtype == DType::F64 || view.dtype == DType::F32 || view.dtype == DType::BF16,
      "{}: {} must have dtype f32, bf16 or f64, got {}", kernel, argument, view.dtype);
}

/// Checks device, dtype, shape and density of an argument. @throws InvalidArgument
inline void check_dense(std::string_view kernel, std::string_view argument, const Context& context,
                        const TensorView& view, DType dtype, const Shape& shape) {
  check_device(kernel, argument, context, view);
  check_dtype(kernel, argument, view, dtype);
  check_shape(kernel, argument, view, shape);
  check_contiguous(kernel, argument, view);
}

/// @throws InvalidArgument unless the view has `dims` dims
inline void check_dims(std::string_view kernel, std::string_view argument, const TensorView& view,
                       int dims) {
  require(view.shape.size() == dims, "{}: {} must have {} dims, got shape {}", kernel, argument,
          dims, view.shape);
}

}  // namespace tessera::kernels
