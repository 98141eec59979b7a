#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::kernels::cuda {

/// Threads per row: a warp, or a block for long rows.
struct NormShape {
  static constexpr int kThreads = 256;
  /// Packs of a row that a thread keeps in registers: a warp holds 1024 or 2048 elements of bf16
  /// (widths of 768 to 1600), a block 8192.
  static constexpr int kFewPacks = 4, kManyPacks = 8;

  int kept = 0;        ///< kFewPacks, kManyPacks, or 0: the row is read again for each pass
  bool block = false;  ///< a team is the block, else a warp

  /// @param pack  elements at a time; divides width
  NormShape(std::int64_t width, int pack) {
    const std::int64_t packs = width / pack;
    constexpr int kWarp = 32;
    if (pack == 1) return;  // a warp to each row
    if (packs <= std::int64_t{kWarp} * kManyPacks) {
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

/// All gradients of a norm in one pass: teams of warps loop over rows with a grid stride, loading
/// their next row to shared memory meanwhile. A thread owns the same columns in every row and keeps
/// their sums in registers.
///
/// An H100 needs 32 to 40 KB in flight per multiprocessor. 16 warps that load one or two rows of x
/// and grad_y ahead have 16 to 32 KB in flight for each pack per thread: 48 KB or more at
/// widths of 768 to 1600. 4 packs of bf16 are 64 sums, so a thread gets 128 registers, and no more warps fit. One
/// block per multiprocessor would halve the partial sums, but two hide each other's barriers.
struct NormGradientsShape {
  static constexpr int kMostPacks = 4;  ///< of a row, per thread
  static constexpr int kFewThreads = 256, kMostThreads = 512;
  static constexpr int kMostWarps = kMostThreads / 32;
  static constexpr int kStages = 2;  ///< rows of a team in shared memory

  int packs = 0;  ///< of a row, per thread; 0: the row is too long
  int team_warps = 1;
  int threads = kFewThreads;

  /// @param pack  elements at a time; divides width
  NormGradientsShape(std::int64_t width, int pack) {
    const std::int64_t warps = (width / pack + 31) / 32;  // at one pack to a thread
    if (warps > std::int64_t{kMostWarps} * kMostPacks) return;
    while (team_warps * kMostPacks < warps) team_warps *= 2;
    packs = static_cast<int>((warps + team_warps - 1) / team_warps);
    threads = std::max(kFewThreads, 32 * team_warps);
  }
  int teams() const { return threads / (32 * team_warps); }
  /// @param operands  number of operands whose rows are copied
  int staged_bytes(int operands) const { return threads * packs * 16 * operands * kStages; }
  /// @param bytes  of a sum; @param accumulate  grad_x is read, too
  int shared_bytes(int bytes, bool accumulate) const {
    return 2 * 2 * kMostWarps * bytes + staged_bytes(accumulate ? 3 : 2);
  }
  /// Number of blocks: as many as the device runs at once, but none without rows.
  /// @param shared_bytes  of a block; @param most_shared  limit of a block on the device
  unsigned blocks(std::int64_t rows, int processors, int shared_bytes, int most_shared) const {
    constexpr int kReserved = 1024;  // bytes that CUDA reserves per block
    const int by_registers = kMostThreads / threads;
    const int together =
        std::clamp((most_shared + kReserved) / (shared_bytes + kReserved), 1, by_registers);
    const std::int64_t useful = (rows + teams() - 1) / teams();
    return static_cast<unsigned>(std::min(useful, std::int64_t{processors} * together));
  }
};

}  // namespace tessera::kernels::cuda
