#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/storage.h"
#include "core/base/tensor_view.h"
#include "core/nested_values.h"

namespace tessera {

namespace autograd {
class Node;
class RowReceiver;
}  // namespace autograd
class TensorImpl;

/// A typed, strided view of a Storage with a place in the autograd graph. A cheap handle: copies
/// share the same tensor. Operations reject tensors of different contexts.
class Tensor {
 public:
  Tensor() = default;  ///< undefined

  /// A dense tensor with undefined contents.
  static Tensor empty(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
                      MemoryCategory category = MemoryCategory::Activations,
                      std::string_view owner = "tensor");
  static Tensor full(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
                     double value, MemoryCategory category = MemoryCategory::Activations,
                     std::string_view owner = "tensor");
  /// A dense copy of `values`. @throws InvalidArgument unless their number fits the shape
  template <typename T>
  static Tensor from(const std::shared_ptr<Context>& context, const Shape& shape,
                     std::span<const T> values) {
    return from_bytes(context, shape, dtype_of<T>(), std::as_bytes(values));
  }
  /// Numbers in nested braces: Tensor::from(context, {{1, 2}, {3, 4}}). dtype is f64, f32, bf16,
  /// i32 or i64. @throws InvalidArgument on braces of different sizes, another dtype, or a number
  /// that is no integer of an integer dtype
  static Tensor from(const std::shared_ptr<Context>& context, const NestedValues& values,
                     DType dtype = DType::F32);
  /// A dense view of a storage, from `offset` on (in elements of `dtype`).
  /// @throws InvalidArgument if it exceeds the storage
  static Tensor window(std::shared_ptr<Storage> storage, std::int64_t offset, const Shape& shape,
                       DType dtype);
  /// A parameter without memory until bind().
  static Tensor unbound(const Shape& shape, DType dtype);

  bool defined() const { return impl_ != nullptr; }
  const Shape& shape() const;
  const Strides& strides() const;
  std::int64_t dim(int i) const { return shape().at(i); }
  std::int64_t numel() const { return tessera::numel(shape()); }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * dtype_size(dtype()); }
  DType dtype() const;
  bool is_contiguous() const { return view_shape().is_contiguous(); }
  const std::shared_ptr<Context>& context() const;
  const std::shared_ptr<Storage>& storage() const;
  Device device() const { return context()->device(); }
  /// View for kernels. @throws InternalError if the storage is released or the tensor unbound
  TensorView view() const;
  template <typename T>
  T* data() const {
    return view().as<T>();
  }
  /// Copy bytes() bytes between a dense tensor and the host. On a GPU, copy_to_host() waits for all
  /// queued work. On the meta device, copy_from_host() does nothing and copy_to_host() throws
  /// Unsupported. copy_from_host() is an in-place change, which backward notices.
  void copy_from_host(const void* from) const;
  void copy_to_host(void* to) const;
  /// A copy of a dense tensor's elements. @throws Unsupported on the meta device
  template <typename T>
  std::vector<T> to_vector() const {
    (void)view().as<T>();
    std::vector<T> values(static_cast<std::size_t>(numel()));
    copy_to_host(values.data());
    return values;
  }
  /// Value of a one-element floating tensor; waits as copy_to_host() does.
  double item() const;

  /// Views outside the autograd graph; see core/ops/view.h for differentiable ones.
  Tensor detach() const;
  Tensor alias(const Shape& shape, const Strides& strides, std::int64_t extra_offset) const;

  /// Moves the tensor to a window of its shape in another storage; keeps identity, graph flags and
  /// gradient buffer. dtype may change (parameters are bound in the compute dtype).
  void bind(std::shared_ptr<Storage> storage, std::int64_t offset, DType dtype);

  // Autograd.
  bool requires_grad() const;  ///< a leaf with gradient, or a result that depends on one
  Tensor& set_requires_grad(bool wanted);
  bool is_leaf() const;
  /// Accumulated gradient of a leaf; undefined after zero_grad().
  Tensor grad() const;
  /// Sets the buffer that a leaf's gradient accumulates into (same shape, any floating dtype). The
  /// first accumulation after this or after zero_grad() overwrites it. After an undefined
  /// buffer, the next gradient allocates one in the accumulator dtype.
  void set_grad_buffer(Tensor buffer);
  /// Sets who may receive a leaf's gradient as rows instead; must outlive the leaf or be reset to null.
  void set_row_receiver(autograd::RowReceiver* receiver);
  /// Discards the accumulated gradient; a buffer set by set_grad_buffer() stays, untouched.
  void zero_grad();
  const std::shared_ptr<autograd::Node>& grad_fn() const;

  TensorImpl* impl() const { return impl_.get(); }
  const std::shared_ptr<TensorImpl>& shared_impl() const { return impl_; }
  explicit Tensor(std::shared_ptr<TensorImpl> impl) : impl_(std::move(impl)) {}

 private:
  static Tensor from_bytes(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
                           std::span<const std::byte> bytes);
  TensorView view_shape() const;  // view() without data
  std::shared_ptr<TensorImpl> impl_;
};

/// The context that all defined tensors share. For operations, before they allocate their result: it
/// also computes late results among the tensors (autograd::result).
/// @param reads  false: leaves them late
/// @throws InvalidArgument naming the operation if contexts differ
const std::shared_ptr<Context>& common_context(std::string_view operation,
                                               std::initializer_list<const Tensor*> tensors,
                                               bool reads = true);

}  // namespace tessera
