#pragma once

#include <cstdint>

namespace tessera::kernels::cuda {

/// A block owns a sum, a grid-stride loop over the sums: a warp for short sums.
struct SumToShape {
  static constexpr int kMostThreads = 256;
  static constexpr std::int64_t kMostBlocks = std::int64_t{1} << 20;
  static unsigned threads(std::int64_t terms) { return terms > 1024 ? kMostThreads : 32; }
  static unsigned blocks(std::int64_t sums) {
    return static_cast<unsigned>(sums < kMostBlocks ? sums : kMostBlocks);
  }
};

}  // namespace tessera::kernels::cuda
