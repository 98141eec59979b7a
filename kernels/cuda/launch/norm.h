#pragma once

#include <cstdint>

namespace tessera::kernels::cuda {

/// Who works on a row: a warp or, where that would leave each thread too much, a block.
struct NormShape {
  static constexpr int kThreads = 256;
  /// Packs of a row that a thread keeps in registers: a warp holds 1024 or 2048 elements of bf16, a
  /// block 8192. The widths of GPT-2 (768 to 1600) are a warp's.
  static constexpr int kFewPacks = 4, kManyPacks = 8;
  /// Elements for each thread of a warp, at most, where rows are read one by one.
  static constexpr int kMostSingle = 32;

  int kept = 0;        ///< kFewPacks, kManyPacks, or 0: the row is read again for each pass
  bool block = false;  ///< a team is the block, else a warp

  /// @param pack  elements at a time; divides width
  NormShape(std::int64_t width, int pack) {
    const std::int64_t packs = width / pack;
    constexpr int kWarp = 32;
    if (pack == 1) {
      block = packs > std::int64_t{kWarp} * kMostSingle;
    } else if (packs <= std::int64_t{kWarp} * kManyPacks) {
      kept = packs <= std::int64_t{kWarp} * kFewPacks ? kFewPacks : kManyPacks;
    } else {
      block = true;
      kept = packs <= std::int64_t{kThreads} * kFewPacks ? kFewPacks : 0;
    }
  }
  unsigned blocks(std::int64_t rows) const {
    const std::int64_t teams = block ? 1 : kThreads / 32;
    return static_cast<unsigned>((rows + teams - 1) / teams);
  }
};

}  // namespace tessera::kernels::cuda
