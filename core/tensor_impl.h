#pragma once

#include <cstdint>
#include <memory>

#include "core/tensor.h"

namespace tessera {

/// What the handles of one tensor share. Internal to core: users see it through Tensor.
class TensorImpl {
 public:
  std::shared_ptr<Storage> storage;  // null: unbound
  std::int64_t offset = 0;           // first element, in elements of dtype
  Shape shape;
  Strides strides;
  DType dtype = DType::F32;

  bool requires_grad = false;
  bool grad_buffer_given = false;        // by set_grad_buffer: outlives zero_grad
  bool has_grad = false;                 // grad_buffer holds something
  std::uint32_t bindings = 0;            // times bind() moved the tensor
  std::shared_ptr<autograd::Node> node;  // what computed this tensor; null for a leaf
  Tensor grad_buffer;                    // leaves only; dense
};

}  // namespace tessera
