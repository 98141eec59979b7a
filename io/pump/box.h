#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "io/pump/chunk.h"

namespace tessera::io {

/// numel(shape), but throws CorruptCheckpoint on overflow. @param where  named in errors
std::int64_t count_elements(const Shape& shape, const std::string& where);

/// Whether a box has the dims of `shape` and lies inside it.
bool is_inside(const Box& box, const Shape& shape);

/// Checks that boxes cover a tensor of `shape` exactly once. Empty boxes are ignored.
/// @param boxes  in order of their offsets
/// @param most   maximum number of boxes that share a row of dim 0; these are compared pairwise
/// @param where  named in errors
/// @throws CorruptCheckpoint on a gap, an overlap, or a box outside the shape
void check_boxes(const Shape& shape, std::span<const Box* const> boxes, std::size_t most,
                 const std::string& where);

/// A run of elements that are contiguous both in a chunk and in the tensor.
struct ChunkRun {
  std::int64_t in_tensor = 0;  ///< first element, row-major in the tensor
  std::int64_t in_chunk = 0;   ///< first element, row-major in the chunk's box
  std::int64_t n = 0;
};

/// Whether the chunk may contain some of elements [begin, end) of the tensor. False is certain.
inline bool touches(const Chunk& chunk, const Shape& shape, std::int64_t begin, std::int64_t end) {
  if (begin == end || chunk.begin == chunk.end) return false;
  if (!chunk.box) return chunk.begin < end && begin < chunk.end;
  std::int64_t first = 0, last = 0;  // corners of the box
  for (int i = 0; i < shape.size(); ++i) {
    first = first * shape[i] + chunk.box->offsets[i];
    last = last * shape[i] + chunk.box->offsets[i] + chunk.box->shape[i] - 1;
  }
  return first < end && begin <= last;
}

/// Number of elements of the chunk's box that precede element `element` of the tensor in row-major
/// order.
inline std::int64_t elements_before(const Chunk& chunk, const Shape& shape, std::int64_t element) {
  if (!chunk.box || shape.empty()) return element;
  std::int64_t in_box = 0, tensor_stride = numel(shape), box_stride = numel(chunk.box->shape);
  for (int i = 0; i < shape.size(); ++i) {
    tensor_stride /= shape[i];
    box_stride /= chunk.box->shape[i];
    const std::int64_t at = element / tensor_stride - chunk.box->offsets[i];
    element %= tensor_stride;
    in_box += std::clamp<std::int64_t>(at, 0, chunk.box->shape[i]) * box_stride;
    if (at < 0 || at >= chunk.box->shape[i]) break;
  }
  return in_box;
}

/// Calls f(ChunkRun) for the parts of the chunk in elements [begin, end) of a tensor of `shape`:
/// once for a chunk without a box, else once per row of the box.
template <typename F>
void for_each_run(const Chunk& chunk, const Shape& shape, std::int64_t begin, std::int64_t end,
                  F&& f) {
  const auto clip = [&](std::int64_t in_tensor, std::int64_t in_chunk, std::int64_t n) {
    const std::int64_t low = std::max(begin, in_tensor);
    const std::int64_t high = std::min(end, in_tensor + n);
    if (low < high) f(ChunkRun{low, in_chunk + low - in_tensor, high - low});
  };
  if (!chunk.box || shape.empty()) {
    clip(chunk.begin, chunk.begin, chunk.end - chunk.begin);
    return;
  }
  const Box& box = *chunk.box;
  // A row spans all trailing dims in which the box equals the tensor.
  std::int64_t row = 1;
  for (int i = shape.size() - 1; i >= 0; --i) {
    row *= box.shape[i];
    if (box.shape[i] != shape[i]) break;
  }
  for (std::int64_t position = chunk.begin; position < chunk.end;) {
    const std::int64_t n = std::min(row - position % row, chunk.end - position);
    std::int64_t rest = position, in_tensor = 0, stride = 1;
    for (int i = shape.size() - 1; i >= 0; --i) {
      in_tensor += (rest % box.shape[i] + box.offsets[i]) * stride;
      rest /= box.shape[i];
      stride *= shape[i];
    }
    clip(in_tensor, position, n);
    position += n;
  }
}

/// Whether the elements of the box are contiguous in the tensor.
inline bool is_one_run(const Box& box, const Shape& shape) {
  bool partial = false;  // a dim after dim i is incomplete
  for (int i = shape.size() - 1; i >= 0; --i) {
    if (partial && box.shape[i] != 1) return false;
    partial = partial || box.shape[i] != shape[i];
  }
  return true;
}

/// Row-major position of the first element of a box in the tensor.
inline std::int64_t first_element(const Box& box, const Shape& shape) {
  std::int64_t position = 0;
  for (int i = 0; i < shape.size(); ++i) position = position * shape[i] + box.offsets[i];
  return position;
}

}  // namespace tessera::io
