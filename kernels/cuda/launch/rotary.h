#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::kernels::cuda {

/// Block (t, b) owns a token: computes the angles of its position, then rotates all heads.
struct RotaryShape {
  static constexpr int kMostThreads = 256;
  static constexpr std::int64_t kMostBatch = 65535;
  /// Numbers of a token, which are counted with ints.
  static constexpr std::int64_t kMostWork = std::int64_t{1} << 30;

  /// Whole warps, one pack per thread up to kMostThreads.
  /// @param packs  packs of pairs per token
  static unsigned threads(std::int64_t packs) {
    const std::int64_t warps = (packs + 31) / 32;
    return 32 * static_cast<unsigned>(std::clamp<std::int64_t>(warps, 1, kMostThreads / 32));
  }
};

}  // namespace tessera::kernels::cuda
