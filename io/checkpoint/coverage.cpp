#include <algorithm>
#include <tuple>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/checkpoint/index.h"
#include "io/pump/box.h"

namespace tessera::io {
namespace {

// Maximum number of boxes of a tensor; no training layout has more.
constexpr std::size_t kMaxBoxes = 4096;

CorruptTensor covered_wrongly(const std::string& where, std::int64_t begin, std::int64_t end,
                              const char* by) {
  return {"", begin, end, fmt::format("{}: elements {} to {} are in {}", where, begin, end, by)};
}

Box whole(const Shape& shape) {
  return {Shape(std::vector<std::int64_t>(static_cast<std::size_t>(shape.size()))), shape};
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
  for (std::size_t i = 0; i < tensor.chunks.size();) {
    const Box& box = box_of(tensor.chunks[i]);
    require<CorruptCheckpoint>(
        is_inside(box, tensor.shape),
        "{}: {} holds the box at {} of shape {}, which is outside the shape {} of the tensor",
        where, tensor.chunks[i].file, box.offsets, box.shape, tensor.shape);
    const std::string in = tensor.chunks[i].box ? fmt::format("{}, box at {} of shape {}", where,
                                                              box.offsets, box.shape)
                                                : where;
    const std::int64_t size = count_elements(box.shape, where);
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
    boxes.push_back(&box);
    require<CorruptCheckpoint>(boxes.size() <= kMaxBoxes, "{}: more than {} boxes", where,
                               kMaxBoxes);
  }
  const std::int64_t size = count_elements(tensor.shape, where);
  if (boxes.empty() && size > 0) throw covered_wrongly(where, 0, size, "no chunk");
  check_boxes(tensor.shape, boxes, kMaxBoxes, where);
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
