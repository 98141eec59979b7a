#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/base/error.h"

namespace tessera::kernels::cuda {

/// Offset, in elements, of 16-byte chunk `chunk` of row `row` in a tile of rows of kDim bf16.
/// The same chunk of 8 aligned rows lies in 8 different groups of banks, as do 8 consecutive chunks
/// of a row, so that neither ldmatrix nor copies of rows have bank conflicts.
template <int kDim>
constexpr int swizzled(int row, int chunk) {
  constexpr int kChunks = kDim / 8;
  static_assert(kDim % 32 == 0);
  const int turn = kChunks % 8 == 0 ? row & 7 : row >> 1 & 3;
  return (row * kChunks + (chunk ^ turn)) * 8;
}

// Tiling of bf16 attention on tensor cores. Rows of heads are padded with zeros to kDim. A block
// owns a tile of rows (queries, or keys for their gradients), kRowTiles times 16 rows per warp, and
// loops over tiles of kStep rows of the other side. Sums (rows x kDim) and scores (rows x kStep) of
// a warp stay in f32 registers; 32 rows per warp (if they fit) halve the reads of shared memory.

/// Forward. In shared memory: a tile of queries, double-buffered tiles of keys and of values.
template <int kDim>
struct AttentionForwardShape {
  static constexpr int kRowTiles = kDim <= 64 ? 2 : 1;
  static constexpr int kWarps = 4;
  static constexpr int kStep = kDim <= 128 ? 64 : 32;
  static constexpr int kRows = kWarps * kRowTiles * 16, kThreads = kWarps * 32;
  static constexpr int kSharedBytes = (kRows + 4 * kStep) * kDim * 2;
};

/// Gradient of queries: tiles of queries and grad_out, double-buffered tiles of keys and values.
template <int kDim>
struct AttentionQueryShape {
  static constexpr int kRowTiles = kDim <= 64 ? 2 : 1;
  static constexpr int kWarps = 4;
  static constexpr int kStep = 32;
  static constexpr int kRows = kWarps * kRowTiles * 16, kThreads = kWarps * 32;
  static constexpr int kSharedBytes = (2 * kRows + 4 * kStep) * kDim * 2;
};

/// Gradients of keys and values: a tile of each, double-buffered tiles of queries and grad_out with
/// the log_sum_exp and delta of the queries. For kDim > 128 a block computes half of the columns,
/// because sums of whole rows would not fit into registers.
template <int kDim>
struct AttentionKeyShape {
  static constexpr int kRowTiles = kDim <= 64 ? 2 : 1;
  static constexpr int kWarps = 4;
  static constexpr int kStep = 32;
  static constexpr int kRows = kWarps * kRowTiles * 16, kThreads = kWarps * 32;
  static constexpr int kParts = kDim > 128 ? 2 : 1;
  static constexpr int kPartDim = kDim / kParts;
  static constexpr int kSharedBytes = (2 * kRows + 4 * kStep) * kDim * 2 + 4 * kStep * 4;
};

/// Attention on CUDA cores, computed in T, f32 or f64: 16 x 16 threads per tile of kRows queries by kRows keys,
/// padded with zeros to kDim. Rows in shared memory are 16 bytes longer, so that 8 rows begin in 8
/// different groups of banks.
template <typename T, int kDim>
struct AttentionPlainShape {
  static constexpr int kSide = 16, kThreads = kSide * kSide;
  static constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(T));
  static constexpr int kRows = kRowBytes <= 512 ? 32 : 16;
  static constexpr int kStride = kDim + kPack, kScoreStride = kRows + kPack;
  static constexpr int kBlocks = sizeof(T) > 4 ? 1 : 2;  // per multiprocessor, limited by registers
  static constexpr int kTile = kRows * kStride, kScores = kRows * kScoreStride;
  static constexpr int shared_bytes(int tiles, int scores) {
    return (tiles * kTile + scores * kScores) * static_cast<int>(sizeof(T));
  }
};

/// Sums of grad_out * out: 8 threads per row.
struct AttentionDeltaShape {
  static constexpr unsigned kThreads = 256;
  static constexpr int kTeam = 8, kTeams = kThreads / kTeam;
};

/// Number of blocks of a one-dimensional grid over the tiles of all heads.
/// @throws Unsupported if there are more blocks than a launch allows
inline unsigned attention_blocks(const char* kernel, std::int64_t tiles, int heads, int batch) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::int64_t all_heads = std::int64_t{heads} * batch;
  require<Unsupported>(tiles == 0 || all_heads <= kMost / tiles,
                       "{}: {} tiles for each of {} heads in a batch of {} are more than a launch "
                       "takes ({})",
                       kernel, tiles, heads, batch, kMost);
  return static_cast<unsigned>(tiles * all_heads);
}

/// Calls f(std::integral_constant<int, kDim>) with the smallest compiled kDim >= dim.
/// @return  false if there is none
template <int... kDims, typename F>
bool visit_head_dim(std::int64_t dim, const F& f) {
  bool found = false;
  (void)((dim <= kDims ? (f(std::integral_constant<int, kDims>{}), found = true) : false) || ...);
  return found;
}
/// Head dims compiled for tensor cores and, below, for CUDA cores. There are fewer for f64, which
/// only tests and gradient checks use.
template <typename F>
bool visit_bf16_head_dim(std::int64_t dim, const F& f) {
  return visit_head_dim<64, 96, 128, 192, 256>(dim, f);
}
template <typename T, typename F>
bool visit_plain_head_dim(std::int64_t dim, const F& f) {
  if constexpr (sizeof(T) > 4)
    return visit_head_dim<64, 256>(dim, f);
  else
    return visit_head_dim<64, 128, 256>(dim, f);
}

}  // namespace tessera::kernels::cuda
