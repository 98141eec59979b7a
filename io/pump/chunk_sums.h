#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "io/pump/chunk.h"

namespace tessera::io {

/// Checksum of `bytes` bytes, continuing `crc`.
std::uint64_t checksum_of(Checksum kind, const void* data, std::size_t bytes,
                          std::uint64_t crc = 0);
std::uint64_t combine_checksums(Checksum kind, std::uint64_t a, std::uint64_t b,
                                std::int64_t bytes_b);

/// Computes the checksum of a range from the checksums of its parts, added in any order.
class RangeSum {
 public:
  /// @param bytes  size of the range
  RangeSum(Checksum kind, std::int64_t bytes) : kind_(kind), left_(bytes) {}
  /// Adds the part at `begin`. @return the checksum of the range once all parts are added
  std::optional<std::uint64_t> add(std::int64_t begin, std::int64_t bytes, std::uint64_t crc);

 private:
  struct Piece {
    std::int64_t begin, bytes;
    std::uint64_t crc;
  };
  Checksum kind_;
  std::int64_t left_;
  std::vector<Piece> pieces_;
};

}  // namespace tessera::io
