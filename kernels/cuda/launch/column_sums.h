#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::kernels::cuda {

/// Tiling of sums over the rows of a [rows, columns] matrix: a warp sums 32 packs of columns, and
/// the warps of a block alternate over its rows. The tiling depends on the sizes only, so that the
/// order of every sum is the same on all devices.
struct ColumnSumsShape {
  static constexpr int kWarps = 8;
  /// Warps of a block in the second pass, which sums the few rows that the blocks of the first leave.
  static constexpr int kFinalWarps = 32;
  /// Rows that a warp loads before it adds, to keep memory busy.
  static constexpr int kTogether = 4;
  /// Four blocks on each of 132 multiprocessors.
  static constexpr std::int64_t kBlocks = 132 * 4;

  std::int64_t tiles = 0;           ///< blocks along the columns
  std::int64_t row_blocks = 1;      ///< blocks along the rows, each with its own sums
  std::int64_t rows_per_block = 0;  ///< the last block may have fewer, but has one

  ColumnSumsShape(std::int64_t rows, std::int64_t columns, int pack) {
    const auto divide = [](std::int64_t n, std::int64_t by) { return (n + by - 1) / by; };
    tiles = divide(columns, std::int64_t{32} * pack);
    if (tiles == 0) return;
    const std::int64_t useful = std::max<std::int64_t>(1, divide(rows, kWarps * kTogether));
    row_blocks = std::clamp<std::int64_t>(kBlocks / tiles, 1, useful);
    rows_per_block = divide(rows, row_blocks);
    if (rows_per_block > 0) row_blocks = divide(rows, rows_per_block);
  }
  /// Partial sums of each column for the second pass; 0: there is one pass.
  std::int64_t partials() const { return row_blocks == 1 ? 0 : row_blocks; }
};

}  // namespace tessera::kernels::cuda
