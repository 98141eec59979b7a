#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "io/checkpoint/index.h"

namespace tessera::io {

/// How the elements of a box, counted row-major inside it, lie in its tensor. A box is visited in
/// order by whoever goes through the tensor in order, so a range of the tensor is a range of each
/// box.
class ChunkRuns {
 public:
  /// @param box  inside `shape`, and not empty
  ChunkRuns(const Box& box, const Shape& shape) : box_(box), shape_(shape) {
    std::int64_t tensor_stride = 1;
    bool whole = true;  // the box spans all dims after this one
    for (int i = shape.size() - 1; i >= 0; --i) {
      const auto d = static_cast<std::size_t>(i);
      box_strides_[d] = elements_;
      tensor_strides_[d] = tensor_stride;
      elements_ *= box.shape[i];
      tensor_stride *= shape[i];
      if (whole) run_ = elements_;
      whole = whole && box.shape[i] == shape[i];
    }
  }

  /// Elements of the box.
  std::int64_t elements() const { return elements_; }
  /// Whether the box is one range of the tensor.
  bool is_one_run() const { return run_ == elements_; }

  /// How many elements of the box lie before an element of the tensor (or its end).
  std::int64_t before(std::int64_t in_tensor) const {
    std::int64_t count = 0;
    for (int i = 0; i < shape_.size(); ++i) {
      const auto d = static_cast<std::size_t>(i);
      const std::int64_t index = in_tensor / tensor_strides_[d] - box_.offsets[i];
      in_tensor %= tensor_strides_[d];
      count += std::clamp<std::int64_t>(index, 0, box_.shape[i]) * box_strides_[d];
      if (index < 0 || index >= box_.shape[i]) return count;
    }
    return shape_.empty() ? std::min<std::int64_t>(in_tensor, 1) : count;
  }

  /// Position in the tensor of an element of the box.
  std::int64_t in_tensor(std::int64_t in_chunk) const {
    std::int64_t position = 0;
    for (int i = 0; i < shape_.size(); ++i) {
      const auto d = static_cast<std::size_t>(i);
      position += (in_chunk / box_strides_[d] + box_.offsets[i]) * tensor_strides_[d];
      in_chunk %= box_strides_[d];
    }
    return position;
  }

  /// Calls f(in_chunk, in_tensor, n) for the runs of neighbours in elements [first, last) of the
  /// box.
  template <typename F>
  void for_each(std::int64_t first, std::int64_t last, F&& f) const {
    for (std::int64_t at = first; at < last;) {
      const std::int64_t n = std::min(run_ - at % run_, last - at);
      f(at, in_tensor(at), n);
      at += n;
    }
  }

 private:
  const Box& box_;
  const Shape& shape_;
  std::array<std::int64_t, Shape::kMaxDims> box_strides_{}, tensor_strides_{};
  std::int64_t elements_ = 1;
  std::int64_t run_ = 1;  // elements that are neighbours in box and tensor
};

}  // namespace tessera::io
