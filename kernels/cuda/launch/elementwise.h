#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::kernels::cuda {

/// Grid-stride loop over n elements, `pack` at a time.
struct ElementwiseShape {
  static constexpr unsigned kThreads = 256;
  /// Enough blocks to fill any device (132 multiprocessors with 8 blocks each) a few times.
  static constexpr std::int64_t kMostBlocks = 132 * 8 * 4;

  static unsigned blocks(std::int64_t n, int pack) {
    const std::int64_t packs = (n + pack - 1) / pack;
    return static_cast<unsigned>(
        std::clamp<std::int64_t>((packs + kThreads - 1) / kThreads, 1, kMostBlocks));
  }
};

}  // namespace tessera::kernels::cuda
