#include "io/pump/chunk_sums.h"

#include <algorithm>

#include "io/base/crc.h"

namespace tessera::io {

std::uint64_t checksum_of(Checksum kind, const void* data, std::size_t bytes, std::uint64_t crc) {
  return kind == Checksum::Crc32 ? crc32(data, bytes, static_cast<std::uint32_t>(crc))
                                 : crc64(data, bytes, crc);
}

std::uint64_t combine_checksums(Checksum kind, std::uint64_t a, std::uint64_t b,
                                std::int64_t bytes_b) {
  const auto n = static_cast<std::uint64_t>(bytes_b);
  return kind == Checksum::Crc32
             ? crc32_combine(static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(b), n)
             : crc64_combine(a, b, n);
}

std::optional<std::uint64_t> RangeSum::add(std::int64_t begin, std::int64_t bytes,
                                           std::uint64_t crc) {
  pieces_.push_back({begin, bytes, crc});
  left_ -= bytes;
  if (left_ > 0) return std::nullopt;
  std::ranges::sort(pieces_, {}, &Piece::begin);
  std::uint64_t sum = 0;
  for (const Piece& piece : pieces_) sum = combine_checksums(kind_, sum, piece.crc, piece.bytes);
  pieces_ = {};
  return sum;
}

}  // namespace tessera::io
