#pragma once

#include <cstdint>

namespace tessera::kernels::cuda {

/// Grouping of pairs: a block owns an expert.
struct GroupPairsShape {
  static constexpr int kThreads = 256;
};

/// Products of rows: a warp owns a pair.
struct RowProductsShape {
  static constexpr int kWarps = 4;
  static unsigned blocks(std::int64_t pairs) {
    return static_cast<unsigned>((pairs + kWarps - 1) / kWarps);
  }
};

/// Grouped matrix products: a block owns a tile of a group's result.
struct GroupedTile {
  static constexpr int kThreads = 128;
  static constexpr int kSide = 64;  ///< rows and columns of the tile
  static constexpr std::int64_t kMostY = 65535;

  static std::int64_t tiles(std::int64_t n) { return (n + kSide - 1) / kSide; }
  /// Tiles of `rows` rows, at most, however `groups` groups share them.
  static std::int64_t most_tiles(std::int64_t rows, std::int64_t groups) {
    return rows / kSide + groups;
  }
};

}  // namespace tessera::kernels::cuda
