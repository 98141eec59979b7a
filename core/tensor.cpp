#include "core/tensor.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/base/device_backend.h"
#include "core/tensor_impl.h"
#include "kernels/elementwise.h"

namespace tessera {
namespace {

TensorImpl& state(const std::shared_ptr<TensorImpl>& impl) {
  require(impl != nullptr,
          "an undefined tensor was used: one that was default-constructed, or the gradient of a "
          "tensor that no backward pass has reached");
  return *impl;
}

const std::shared_ptr<Storage>& bound_storage(const TensorImpl& impl) {
  require(impl.storage != nullptr,
          "a parameter of shape {} was used before it had memory: materialize() or shard its model "
          "first",
          impl.shape);
  return impl.storage;
}

// Checks that elements [offset, offset + needed) lie in the storage.
void check_window(const Storage& storage, std::int64_t offset, std::int64_t needed,
                  const Shape& shape, DType dtype) {
  const auto capacity = static_cast<std::int64_t>(storage.bytes() / dtype_size(dtype));
  require(offset >= 0 && offset <= capacity && needed <= capacity - offset,
          "a window of shape {} {} at element {} does not fit into a storage of {} elements", shape,
          dtype, offset, capacity);
}

std::shared_ptr<TensorImpl> make_impl(std::shared_ptr<Storage> storage, std::int64_t offset,
                                      const Shape& shape, const Strides& strides, DType dtype) {
  auto impl = std::make_shared<TensorImpl>();
  impl->storage = std::move(storage);
  impl->offset = offset;
  impl->shape = shape;
  impl->strides = strides;
  impl->dtype = dtype;
  return impl;
}

}  // namespace

Tensor Tensor::empty(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
                     MemoryCategory category, std::string_view owner) {
  require(context != nullptr, "a tensor of shape {} needs a context, got none", shape);
  const std::int64_t count = tessera::numel(shape);
  const auto size = static_cast<std::int64_t>(dtype_size(dtype));
  require(count <= std::numeric_limits<std::int64_t>::max() / size,
          "a tensor of shape {} {} has more than 2^63 - 1 bytes", shape, dtype);
  auto storage =
      Storage::allocate(context, static_cast<std::size_t>(count * size), category, owner);
  return Tensor(make_impl(std::move(storage), 0, shape, contiguous_strides(shape), dtype));
}

Tensor Tensor::full(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
                    double value, MemoryCategory category, std::string_view owner) {
  Tensor result = empty(context, shape, dtype, category, owner);
  kernels::fill(*context, result.view(), value);
  return result;
}

Tensor Tensor::from_bytes(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
                          std::span<const std::byte> bytes) {
  const std::size_t count = bytes.size() / dtype_size(dtype);
  require(static_cast<std::int64_t>(count) == tessera::numel(shape),
          "shape {} needs {} values, got {}", shape, tessera::numel(shape), count);
  Tensor result = empty(context, shape, dtype);
  result.copy_from_host(bytes.data());
  return result;
}

namespace {

template <typename T>
Tensor from_numbers(const std::shared_ptr<Context>& context, const NestedValues& numbers) {
  std::vector<T> values;
  for (const double number : numbers.values()) {
    if constexpr (std::is_integral_v<T>) {
      // Compared in double: both limits are exact, as the upper one is a power of two.
      const double limit = -static_cast<double>(std::numeric_limits<T>::min());
      require(number >= -limit && number < limit && number == std::trunc(number),
              "Tensor::from: {} is no {} integer", number, dtype_of<T>());
      values.push_back(static_cast<T>(number));
    } else {
      values.push_back(T(static_cast<Accumulator<T>>(number)));
    }
  }
  return Tensor::from<T>(context, numbers.shape(), values);
}

}  // namespace

Tensor Tensor::from(const std::shared_ptr<Context>& context, const NestedValues& values,
                    DType dtype) {
  if (dtype == DType::I32) return from_numbers<std::int32_t>(context, values);
  if (dtype == DType::I64) return from_numbers<std::int64_t>(context, values);
  require(dtype == DType::F64 || dtype == DType::F32 || dtype == DType::BF16,
          "Tensor::from: dtype must be f64, f32, bf16, i32 or i64, got {}", dtype);
  return visit_floating(dtype, "Tensor::from", [&]<typename T>(std::type_identity<T>) {
    return from_numbers<T>(context, values);
  });
}

void Tensor::copy_from_host(const void* from) const {
  storage()->bump_version();
  if (device().type == DeviceType::Meta || bytes() == 0) return;
  require(is_contiguous(), "copying needs a contiguous tensor, got strides {}", strides());
  void* const data = view().data;
  if (device().type != DeviceType::CPU)
    context()->backend().copy_from_host(data, from, bytes());
  else if (data != nullptr)  // null: a tensor without memory
    std::memcpy(data, from, bytes());
}

void Tensor::copy_to_host(void* to) const {
  require<Unsupported>(device().type != DeviceType::Meta, "a tensor on {} has no values to read",
                       device().str());
  if (bytes() == 0) return;
  require(is_contiguous(), "copying needs a contiguous tensor, got strides {}", strides());
  const void* const data = view().data;
  if (device().type != DeviceType::CPU)
    context()->backend().copy_to_host(to, data, bytes());
  else if (data != nullptr)
    std::memcpy(to, data, bytes());
}

Tensor Tensor::window(std::shared_ptr<Storage> storage, std::int64_t offset, const Shape& shape,
                      DType dtype) {
  require(storage != nullptr, "a window of shape {} needs a storage, got none", shape);
  check_window(*storage, offset, tessera::numel(shape), shape, dtype);
  return Tensor(make_impl(std::move(storage), offset, shape, contiguous_strides(shape), dtype));
}

Tensor Tensor::unbound(const Shape& shape, DType dtype) {
  (void)tessera::numel(shape);  // rejects negative sizes
  return Tensor(make_impl(nullptr, 0, shape, contiguous_strides(shape), dtype));
}

const Shape& Tensor::shape() const { return state(impl_).shape; }
const Strides& Tensor::strides() const { return state(impl_).strides; }
DType Tensor::dtype() const { return state(impl_).dtype; }
const std::shared_ptr<Storage>& Tensor::storage() const { return bound_storage(state(impl_)); }
const std::shared_ptr<Context>& Tensor::context() const { return storage()->context(); }

TensorView Tensor::view_shape() const {
  const TensorImpl& impl = state(impl_);
  return {nullptr, impl.dtype, impl.shape, impl.strides, {}};
}

TensorView Tensor::view() const {
  const std::shared_ptr<Storage>& memory = storage();
  TensorView view = view_shape();
  view.device = memory->context()->device();
  view.data = memory->data();
  view.data = view.at(impl_->offset);
  return view;
}

double Tensor::item() const {
  require(numel() == 1, "item() needs a tensor of one element, got shape {}", shape());
  return visit_floating(dtype(), "item()", [&]<typename T>(std::type_identity<T>) {
    T value;
    copy_to_host(&value);
    if constexpr (std::is_same_v<T, double>)
      return value;
    else
      return static_cast<double>(static_cast<float>(value));
  });
}

Tensor Tensor::detach() const {
  const TensorImpl& impl = state(impl_);
  return Tensor(make_impl(impl.storage, impl.offset, impl.shape, impl.strides, impl.dtype));
}

Tensor Tensor::alias(const Shape& shape, const Strides& strides, std::int64_t extra_offset) const {
  const TensorImpl& impl = state(impl_);
  require(shape.size() == strides.size(), "shape {} and strides {} differ in length", shape,
          strides);
  std::int64_t reach = tessera::numel(shape) == 0 ? 0 : 1;
  for (int i = 0; i < shape.size(); ++i) {
    require(strides[i] >= 0, "strides of an alias must not be negative, got {}", strides);
    if (reach > 0) reach += (shape[i] - 1) * strides[i];
  }
  check_window(*bound_storage(impl), impl.offset + extra_offset, reach, shape, impl.dtype);
  return Tensor(make_impl(impl.storage, impl.offset + extra_offset, shape, strides, impl.dtype));
}

void Tensor::bind(std::shared_ptr<Storage> storage, std::int64_t offset, DType dtype) {
  TensorImpl& impl = state(impl_);
  require(impl.node == nullptr, "only leaves can be bound; shape {} is the result of an operation",
          impl.shape);
  require(storage != nullptr, "bind of shape {} needs a storage, got none", impl.shape);
  require(is_floating(dtype) || !impl.requires_grad,
          "a tensor that requires a gradient must stay floating, got dtype {}", dtype);
  check_window(*storage, offset, tessera::numel(impl.shape), impl.shape, dtype);
  impl.storage = std::move(storage);
  impl.offset = offset;
  impl.strides = contiguous_strides(impl.shape);
  impl.dtype = dtype;
  ++impl.bindings;
}

bool Tensor::requires_grad() const { return state(impl_).requires_grad; }
bool Tensor::is_leaf() const { return state(impl_).node == nullptr; }
const std::shared_ptr<autograd::Node>& Tensor::grad_fn() const { return state(impl_).node; }

Tensor& Tensor::set_requires_grad(bool wanted) {
  TensorImpl& impl = state(impl_);
  require(impl.node == nullptr,
          "requires_grad of a result (shape {}) follows from its inputs; use detach()", impl.shape);
  require(!wanted || is_floating(impl.dtype), "only floating tensors have gradients, got dtype {}",
          impl.dtype);
  impl.requires_grad = wanted;
  return *this;
}

Tensor Tensor::grad() const {
  const TensorImpl& impl = state(impl_);
  return impl.has_grad ? impl.grad_buffer : Tensor();
}

void Tensor::set_grad_buffer(Tensor buffer) {
  TensorImpl& impl = state(impl_);
  require(impl.node == nullptr, "only leaves keep a gradient; shape {} is a result", impl.shape);
  if (buffer.defined()) {
    require(buffer.shape() == impl.shape, "a gradient buffer must have shape {}, got {}",
            impl.shape, buffer.shape());
    require(is_floating(buffer.dtype()), "a gradient buffer must be floating, got dtype {}",
            buffer.dtype());
    require(buffer.is_contiguous(), "a gradient buffer must be contiguous, got strides {}",
            buffer.strides());
  }
  impl.grad_buffer_given = buffer.defined();
  impl.grad_buffer = std::move(buffer);
  impl.has_grad = false;
}

void Tensor::set_row_receiver(autograd::RowReceiver* receiver) {
  state(impl_).row_receiver = receiver;
}

void Tensor::zero_grad() {
  TensorImpl& impl = state(impl_);
  impl.has_grad = false;
  if (!impl.grad_buffer_given) impl.grad_buffer = Tensor();
}

const std::shared_ptr<Context>& common_context(std::string_view operation,
                                               std::initializer_list<const Tensor*> tensors,
                                               bool reads) {
  const std::shared_ptr<Context>* first = nullptr;
  for (const Tensor* tensor : tensors) {
    if (!tensor->defined()) continue;
    const std::shared_ptr<Context>& context = tensor->context();
    if (first == nullptr) first = &context;
    require(
        context == *first,
        "{}: tensors of different contexts ({} and {}); a rank makes all of its tensors with one "
        "Context, and copies others through the host",
        operation, (*first)->device().str(), context->device().str());
  }
  require(first != nullptr, "{}: needs a defined tensor, got none", operation);
  for (const Tensor* tensor : tensors)
    if (reads && tensor->defined() && tensor->storage()->owned_supplier() != nullptr)
      (void)tensor->view();
  return *first;
}

}  // namespace tessera
