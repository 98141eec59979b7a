#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/base/device.h"

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
/// widths of 768 to 1600. 4 packs of bf16 are 64 sums (72, if 3 packs have the sums of grad_x, too),
/// so a thread gets 128 registers, and no more warps fit. One block per multiprocessor would halve
/// the partial sums, but two hide each other's barriers.
struct NormGradientsShape {
  /// Packs of a row, per thread.
  static constexpr int most_packs(bool input_sums) { return input_sums ? 3 : 4; }
  static constexpr int kFewThreads = 256, kMostThreads = 512;
  static constexpr int kMostWarps = kMostThreads / 32;
  static constexpr int kStages = 2;  ///< rows of a team in shared memory

  int packs = 0;  ///< of a row, per thread; 0: the row is too long for the kernel or the device
  int team_warps = 1;
  int threads = kFewThreads;
  int shared_bytes = 0;         ///< of a block
  std::int64_t block_sums = 0;  ///< sums that each block writes

  /// @param pack  elements at a time; divides width
  /// @param parameters  whose gradients are summed; @param input_sums  and grad_x
  /// @param accumulate  grad_x is read, too
  /// @param bytes  of a sum
  NormGradientsShape(std::int64_t width, int pack, int parameters, bool input_sums, bool accumulate,
                     std::size_t bytes, const DeviceLimits& gpu) {
    const std::int64_t most = most_packs(input_sums);
    const std::int64_t warps = (width / pack + 31) / 32;  // at one pack to a thread
    if (warps > kMostWarps * most) return;
    while (team_warps * most < warps) team_warps *= 2;
    threads = std::max(kFewThreads, 32 * team_warps);
    const std::int64_t row_packs = (warps + team_warps - 1) / team_warps;
    block_sums = width * (parameters + (input_sums ? 1 : 0));
    const std::int64_t sum_bytes = teams() * block_sums * static_cast<std::int64_t>(bytes);
    const std::int64_t rows_bytes = threads * row_packs * 16 * (accumulate ? 3 : 2) * kStages;
    const std::int64_t scratch = 2 * 2 * kMostWarps * static_cast<std::int64_t>(bytes);
    const std::int64_t shared = scratch + std::max(rows_bytes, sum_bytes);
    if (shared > gpu.shared_bytes) return;
    shared_bytes = static_cast<int>(shared);
    packs = static_cast<int>(row_packs);
  }
  int teams() const { return threads / (32 * team_warps); }
  /// Number of blocks: as many as the device runs at once, but none without rows.
  unsigned blocks(std::int64_t rows, const DeviceLimits& gpu) const {
    constexpr int kReserved = 1024;  // bytes that CUDA reserves per block
    const int by_registers = kMostThreads / threads;
    const int together =
        std::clamp((gpu.shared_bytes + kReserved) / (shared_bytes + kReserved), 1, by_registers);
    const std::int64_t useful = (rows + teams() - 1) / teams();
    return static_cast<unsigned>(std::min(useful, std::int64_t{gpu.processors} * together));
  }
};

}  // namespace tessera::kernels::cuda
