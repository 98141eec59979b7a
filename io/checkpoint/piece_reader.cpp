#include "io/checkpoint/piece_reader.h"

#include <algorithm>

#include "core/base/error.h"
#include "io/base/crc64.h"

namespace tessera::io {
namespace {

const Chunk& chunk_of(const std::string& name, const TensorRecord& tensor, const PieceSum& piece) {
  // The last chunk that begins at or before it; empty ones begin where others do.
  auto chunk = std::upper_bound(tensor.chunks.begin(), tensor.chunks.end(), piece.begin,
                                [](std::int64_t e, const Chunk& c) { return e < c.begin; });
  require<InternalError>(chunk != tensor.chunks.begin(), "no chunk of {} has element {}", name,
                         piece.begin);
  --chunk;
  require<InternalError>(piece.end <= chunk->end,
                         "elements {} to {} of {} lie in more than one chunk", piece.begin,
                         piece.end, name);
  return *chunk;
}

}  // namespace

bool is_boxed(const TensorRecord& tensor) {
  return std::any_of(tensor.chunks.begin(), tensor.chunks.end(),
                     [](const Chunk& chunk) { return chunk.box.has_value(); }) &&
         !tensor_checksum(tensor);
}

std::vector<std::int64_t> PieceReader::ends(const TensorRecord& tensor) {
  const std::int64_t size = numel(tensor.shape);
  std::vector<std::int64_t> ends;
  if (!is_boxed(tensor)) {
    for (const Chunk& chunk : tensor.chunks) {
      if (chunk.begin > 0 && chunk.begin < chunk.end) ends.push_back(chunk.begin);
    }
  }
  ends.push_back(size);
  return ends;
}

void PieceReader::read(Section section, const std::string& name, const TensorRecord& tensor,
                       std::span<PieceSum> pieces, void* out) {
  const auto width = static_cast<std::int64_t>(dtype_size(tensor.dtype));
  auto* at = static_cast<char*>(out);
  if (is_boxed(tensor)) {
    reader_.read(section, name, pieces.front().begin, pieces.back().end, out, tensor.dtype);
  } else {
    for (auto first = pieces.begin(), last = first; first != pieces.end(); first = last) {
      const Chunk& chunk = chunk_of(name, tensor, *first);
      const std::int64_t begin = chunk.byte_begin + (first->begin - chunk.begin) * width;
      std::int64_t end = begin;
      for (; last != pieces.end(); ++last) {
        const Chunk& next = chunk_of(name, tensor, *last);
        const bool joins =
            next.file == chunk.file && next.byte_begin + (last->begin - next.begin) * width == end;
        if (!joins) break;
        end += (last->end - last->begin) * width;
      }
      files_.get(chunk.file)->read(begin, at, static_cast<std::size_t>(end - begin));
      at += end - begin;
    }
    at = static_cast<char*>(out);
  }
  for (PieceSum& piece : pieces) {
    const std::int64_t bytes = (piece.end - piece.begin) * width;
    piece.crc64 = crc64(at, static_cast<std::size_t>(bytes));
    at += bytes;
  }
}

void PieceReader::verify(Section section, const std::string& name, const TensorRecord& tensor,
                         std::span<const PieceSum> pieces) const {
  if (is_boxed(tensor)) return;
  const auto width = static_cast<std::int64_t>(dtype_size(tensor.dtype));
  auto piece = pieces.begin();
  for (const Chunk& chunk : tensor.chunks) {
    std::uint64_t crc = 0;
    for (; piece != pieces.end() && piece->end <= chunk.end; ++piece) {
      crc = crc64_combine(crc, piece->crc64,
                          static_cast<std::uint64_t>((piece->end - piece->begin) * width));
    }
    if (crc != chunk.crc64) reader_.fail_checksum(section, name, chunk);
  }
}

}  // namespace tessera::io
