#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::kernels::cuda {

/// A block owns a row.
struct SoftmaxShape {
  static constexpr std::int64_t kMostThreads = 256;
  static constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - 1;

  /// Whole warps, about four columns per thread.
  static unsigned threads(std::int64_t columns) {
    return 32 * static_cast<unsigned>(
                    std::clamp<std::int64_t>((columns + 127) / 128, 1, kMostThreads / 32));
  }
};

}  // namespace tessera::kernels::cuda
