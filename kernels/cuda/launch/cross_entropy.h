#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/base/device.h"

namespace tessera::kernels::cuda {

/// A block owns a row.
struct CrossEntropyShape {
  /// @param bytes  of an element; doubles need more registers
  static constexpr unsigned most_threads(std::size_t bytes) { return bytes > 4 ? 512 : 1024; }
  /// Columns are ints that must not overflow one block beyond the end of a row.
  static constexpr std::int64_t kMostColumns = std::int64_t{1} << 30;

  /// Whole warps, about 16 columns per thread.
  static unsigned threads(std::int64_t columns, std::size_t bytes) {
    const std::int64_t warps = (columns + 16 * 32 - 1) / (16 * 32);
    return 32 * static_cast<unsigned>(std::clamp<std::int64_t>(warps, 1, most_threads(bytes) / 32));
  }

  /// Whether two blocks that take `bytes` of shared memory fit a multiprocessor, so that one reads
  /// while the other one writes. CUDA takes 1 KiB for each block.
  static bool keeps(std::int64_t bytes, const DeviceLimits& limits) {
    constexpr std::int64_t kReserved = 1024;
    return 2 * (bytes + kReserved) <= limits.shared_bytes + kReserved;
  }
};

}  // namespace tessera::kernels::cuda
