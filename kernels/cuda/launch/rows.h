#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::kernels::cuda {

/// Elementwise work on strided rows: block (r, b) owns part b of row r, one pack per thread if
/// there are enough blocks.
struct RowsShape {
  static constexpr std::int64_t kMostThreads = 256;
  static constexpr std::int64_t kMostParts = 65535;
  static constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - 1;

  unsigned threads = 32;  ///< whole warps
  unsigned parts = 1;     ///< blocks for each row

  /// @param packs  packs per row, 1 or more
  explicit RowsShape(std::int64_t packs) {
    const auto divide = [](std::int64_t n, std::int64_t by) { return (n + by - 1) / by; };
    parts = static_cast<unsigned>(std::min(divide(packs, kMostThreads), kMostParts));
    threads = static_cast<unsigned>(std::min(divide(divide(packs, parts), 32) * 32, kMostThreads));
  }
};

}  // namespace tessera::kernels::cuda
