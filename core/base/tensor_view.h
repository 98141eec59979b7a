#pragma once

#include <cstddef>

#include "core/base/device.h"
#include "core/base/dtype.h"
#include "core/base/shape.h"

namespace tessera {

/// A typed, strided, non-owning view of memory, for kernels, communication and io. Strides are in
/// elements. `data` is null for meta tensors and may be null if numel is 0.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::F32;
  Shape shape;
  Strides strides;
  Device device;

  std::int64_t numel() const { return tessera::numel(shape); }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * dtype_size(dtype); }
  /// Dense and row-major; dims of size 1 may have any stride.
  bool is_contiguous() const {
    std::int64_t expected = 1;
    for (int i = shape.size() - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != expected) return false;
      expected *= shape[i] == 0 ? 1 : shape[i];  // as contiguous_strides() does
    }
    return true;
  }
  /// Data as T. @throws InvalidArgument if T is not the dtype
  template <typename T>
  T* as() const {
    if (dtype_of<T>() != dtype) throw_unexpected_dtype(dtype_of<T>(), dtype);
    return static_cast<T*>(data);
  }
  /// Address of the element at `offset`, in elements; null if `data` is null.
  void* at(std::int64_t offset) const {
    if (data == nullptr) return nullptr;
    return static_cast<std::byte*>(data) + static_cast<std::size_t>(offset) * dtype_size(dtype);
  }
  /// Elements [begin, begin + count) of dim `dim`.
  TensorView narrow(int dim, std::int64_t begin, std::int64_t count) const {
    TensorView part = *this;
    part.shape[dim] = count;
    part.data = at(begin * strides[dim]);
    return part;
  }
  bool defined() const { return !shape.empty() || data != nullptr; }
};

/// Destination of a gradient in a backward kernel: added to if `accumulate`, else overwritten;
/// skipped unless `wanted`.
struct GradientView {
  TensorView view;
  bool accumulate = false;
  bool wanted = false;
  explicit operator bool() const { return wanted; }
};

/// A dense view of `shape` at `data`.
inline TensorView dense_view(void* data, DType dtype, const Shape& shape, Device device = {}) {
  return {data, dtype, shape, contiguous_strides(shape), device};
}

}  // namespace tessera
