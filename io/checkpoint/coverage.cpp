// Checks that the chunks of a tensor cover it exactly once; checksum of a whole tensor.

#include <algorithm>
#include <tuple>

#include "core/base/error.h"
#include "io/base/crc64.h"
#include "io/checkpoint/index.h"

namespace tessera::io {
namespace {

// Boxes are compared pairwise; no training layout has more.
constexpr std::size_t kMaxBoxes = 4096;

std::int64_t element_count(const Shape& shape, const std::string& where) {
  try {
    return numel(shape);
  } catch (const InvalidArgument& error) {
    throw CorruptCheckpoint("{}: {}", where, error.what());
  }
}

CorruptTensor covered_wrongly(const std::string& where, std::int64_t begin, std::int64_t end,
                              const char* by) {
  return {"", begin, end, fmt::format("{}: elements {} to {} are in {}", where, begin, end, by)};
}

Box whole(const Shape& shape) {
  Shape offsets = shape;
  for (int i = 0; i < offsets.size(); ++i) offsets[i] = 0;
  return {offsets, shape};
}

void check_inside(const Box& box, const Shape& shape, const std::string& where) {
  bool inside = box.offsets.size() == shape.size() && box.shape.size() == shape.size();
  for (int i = 0; inside && i < shape.size(); ++i) {
    inside = box.shape[i] <= shape[i] && box.offsets[i] <= shape[i] - box.shape[i];
  }
  require<CorruptCheckpoint>(inside, "{}: the box at {} of shape {} is outside the shape {}", where,
                             box.offsets, box.shape, shape);
}

bool disjoint(const Box& a, const Box& b) {
  for (int i = 0; i < a.shape.size(); ++i) {
    if (a.offsets[i] >= b.offsets[i] + b.shape[i] || b.offsets[i] >= a.offsets[i] + a.shape[i]) {
      return true;
    }
  }
  return false;
}

}  // namespace

void check_coverage(TensorRecord& tensor, const std::string& where) {
  const Box all = whole(tensor.shape);
  const auto box_of = [&](const Chunk& chunk) -> const Box& {
    return chunk.box ? *chunk.box : all;
  };
  const auto key = [&](const Chunk& chunk) {
    const Box& box = box_of(chunk);
    return std::tuple(std::vector<std::int64_t>(box.offsets.begin(), box.offsets.end()),
                      std::vector<std::int64_t>(box.shape.begin(), box.shape.end()), chunk.begin,
                      chunk.end);
  };
  const bool boxed = std::any_of(tensor.chunks.begin(), tensor.chunks.end(),
                                 [](const Chunk& chunk) { return chunk.box.has_value(); });
  std::sort(tensor.chunks.begin(), tensor.chunks.end(), [&](const Chunk& a, const Chunk& b) {
    return boxed ? key(a) < key(b) : std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });

  std::vector<const Box*> boxes;
  std::int64_t covered = 0;
  for (std::size_t i = 0; i < tensor.chunks.size();) {
    const Box& box = box_of(tensor.chunks[i]);
    const std::string in = tensor.chunks[i].box ? fmt::format("{}, box at {} of shape {}", where,
                                                              box.offsets, box.shape)
                                                : where;
    check_inside(box, tensor.shape, where);
    const std::int64_t size = element_count(box.shape, where);
    std::int64_t position = 0;
    for (; i < tensor.chunks.size() && box_of(tensor.chunks[i]) == box; ++i) {
      const Chunk& chunk = tensor.chunks[i];
      if (chunk.begin > position) throw covered_wrongly(in, position, chunk.begin, "no chunk");
      if (chunk.begin < position) {
        throw covered_wrongly(in, chunk.begin, std::min(position, chunk.end), "two chunks");
      }
      require<CorruptCheckpoint>(chunk.end <= size,
                                 "{}: a chunk ends at element {}, but there are {}", where,
                                 chunk.end, size);
      position = chunk.end;
    }
    if (position != size) throw covered_wrongly(in, position, size, "no chunk");
    require<CorruptCheckpoint>(!__builtin_add_overflow(covered, size, &covered),
                               "{}: chunks hold more than 2^63 elements", where);
    boxes.push_back(&box);
    require<CorruptCheckpoint>(boxes.size() <= kMaxBoxes, "{}: more than {} boxes", where,
                               kMaxBoxes);
  }
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    for (std::size_t j = i + 1; j < boxes.size(); ++j) {
      require<CorruptCheckpoint>(disjoint(*boxes[i], *boxes[j]),
                                 "{}: the boxes at {} and {} overlap", where, boxes[i]->offsets,
                                 boxes[j]->offsets);
    }
  }
  const std::int64_t size = element_count(tensor.shape, where);
  if (boxes.empty() && size > 0) throw covered_wrongly(where, 0, size, "no chunk");
  require<CorruptCheckpoint>(covered == size, "{}: chunks hold {} of {} elements", where, covered,
                             size);
}

std::optional<std::uint64_t> tensor_checksum(const TensorRecord& tensor) {
  std::uint64_t crc = 0;
  for (const Chunk& chunk : tensor.chunks) {
    if (chunk.box && *chunk.box != whole(tensor.shape)) return std::nullopt;
    crc = crc64_combine(crc, chunk.crc64,
                        static_cast<std::uint64_t>(chunk.byte_end - chunk.byte_begin));
  }
  return crc;
}

}  // namespace tessera::io
