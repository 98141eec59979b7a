#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace tessera::kernels::cuda {

/// A block owns a row.
struct CrossEntropyShape {
  /// By size of an element: doubles need more registers.
  static constexpr unsigned most_threads(std::size_t bytes) { return bytes > 4 ? 512 : 1024; }
  /// The row's index is an int, and a block beyond the row's end must not overflow it.
  static constexpr std::int64_t kMostColumns = std::int64_t{1} << 30;

  /// Whole warps, at about 16 columns to a thread.
  static unsigned threads(std::int64_t columns, std::size_t bytes) {
    const std::int64_t warps = (columns + 16 * 32 - 1) / (16 * 32);
    return 32 * static_cast<unsigned>(std::clamp<std::int64_t>(warps, 1, most_threads(bytes) / 32));
  }
};

}  // namespace tessera::kernels::cuda
