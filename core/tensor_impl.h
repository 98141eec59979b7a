#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/tensor.h"

namespace tessera {

/// State shared by the handles of one tensor. Internal to core.
class TensorImpl {
 public:
  std::shared_ptr<Storage> storage;  // null: unbound
  std::int64_t offset = 0;           // first element, in elements of dtype
  Shape shape;
  Strides strides;
  DType dtype = DType::F32;

  bool requires_grad = false;
  bool grad_buffer_given = false;        // by set_grad_buffer(); outlives zero_grad()
  bool has_grad = false;                 // grad_buffer holds a gradient
  std::uint32_t bindings = 0;            // number of bind() calls
  std::shared_ptr<autograd::Node> node;  // producer of this tensor; null for a leaf
  std::size_t output = 0;                // which of the producer's outputs it is
  Tensor grad_buffer;                    // leaves only; dense
  autograd::RowReceiver* row_receiver = nullptr;
};

}  // namespace tessera
