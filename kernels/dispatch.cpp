#include "kernels/dispatch.h"

#include "core/base/device_backend.h"
#include "core/base/memory.h"

namespace tessera::kernels {
namespace {

void check_dtype(std::string_view kernel, std::string_view argument, const TensorView& view,
                 DType expected) {
  require(view.dtype == expected, "{}: {} must have dtype {}, got {}", kernel, argument, expected,
          view.dtype);
}

}  // namespace

void throw_no_kernel(std::string_view kernel, Device device) {
  throw Unsupported("kernel {} is not available on {}; it runs on cpu", kernel, device.str());
}

bool run_on_device(std::string_view kernel, Context& context, const void* args) {
  try {
    return context.backend().run_kernel(kernel, context, args);
  } catch (const OutOfMemory& error) {
    throw OutOfMemory("{}", with_ledger(error.what(), context.ledger()));
  }
}

void check_device(std::string_view kernel, std::string_view argument, const Context& context,
                  const TensorView& view) {
  require(view.device == context.device(), "{}: {} is on {}, the context on {}", kernel, argument,
          view.device.str(), context.device().str());
}

void check_shape(std::string_view kernel, std::string_view argument, const TensorView& view,
                 const Shape& expected) {
  require(view.shape == expected, "{}: {} must have shape {}, got {}", kernel, argument, expected,
          view.shape);
}

void check_dense(std::string_view kernel, std::string_view argument, const Context& context,
                 const TensorView& view, DType dtype) {
  check_device(kernel, argument, context, view);
  check_dtype(kernel, argument, view, dtype);
  require(view.is_contiguous(), "{}: {} must be contiguous, got shape {} with strides {}", kernel,
          argument, view.shape, view.strides);
}

void check_single(std::string_view kernel, std::string_view argument, const Context& context,
                  const TensorView& view, DType dtype) {
  check_device(kernel, argument, context, view);
  check_dtype(kernel, argument, view, dtype);
  require(view.numel() == 1, "{}: {} must have one element, got shape {}", kernel, argument,
          view.shape);
}

void check_computing_dtype(std::string_view kernel, std::string_view argument,
                           const TensorView& view) {
  require<Unsupported>(
      view.dtype == DType::F64 || view.dtype == DType::F32 || view.dtype == DType::BF16,
      "{}: {} must have dtype f32, bf16 or f64, got {}", kernel, argument, view.dtype);
}

}  // namespace tessera::kernels
