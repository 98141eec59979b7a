#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/base/error.h"

namespace tessera::kernels::cuda {

/// Where the 16 bytes `chunk` of row `row` begin, in elements, in a tile of rows of kDim bf16. Any
/// 8 rows that begin at a multiple of 8 hold a chunk in 8 different groups of banks, as do any 8
/// chunks of a row: so neither ldmatrix nor copies of rows meet a conflict.
template <int kDim>
constexpr int swizzled(int row, int chunk) {
  constexpr int kChunks = kDim / 8;
  static_assert(kDim % 32 == 0);
  const int turn = kChunks % 8 == 0 ? row & 7 : row >> 1 & 3;
  return (row * kChunks + (chunk ^ turn)) * 8;
}

// How attention of bf16 on tensor cores is cut. Rows of heads are padded with zeros to kDim: 32,
// 64, 96, 128, 192 or 256. A block's tile of rows (of queries, or of keys for their gradients)
// belongs to kWarps warps, each with kRowTiles times 16 rows; the other side passes by in tiles of
// kStep rows. The sums of a warp, its rows times kDim, and its scores, its rows times kStep, lie in
// registers, in f32; 32 rows to a warp, where they fit, halve the reading of shared memory.

/// Forward: a tile of queries, and two stages of a tile of keys and one of values.
template <int kDim>
struct AttentionForwardShape {
  static constexpr int kRowTiles = kDim <= 64 ? 2 : 1;
  static constexpr int kWarps = 4;
  static constexpr int kStep = kDim <= 128 ? 64 : 32;
  static constexpr int kRows = kWarps * kRowTiles * 16, kThreads = kWarps * 32;
  static constexpr int kSharedBytes = (kRows + 4 * kStep) * kDim * 2;
};

/// Gradient of queries: a tile of queries and one of grad_out, and two stages of keys and values.
template <int kDim>
struct AttentionQueryShape {
  static constexpr int kRowTiles = kDim <= 64 ? 2 : 1;
  static constexpr int kWarps = 4;
  static constexpr int kStep = kDim <= 32 ? 64 : 32;
  static constexpr int kRows = kWarps * kRowTiles * 16, kThreads = kWarps * 32;
  static constexpr int kSharedBytes = (2 * kRows + 4 * kStep) * kDim * 2;
};

/// Gradients of keys and values: a tile of each, and two stages of queries, of grad_out, and of the
/// log_sum_exp and delta of the queries. For long rows a block makes half of the columns: the sums
/// of whole rows would not fit into registers.
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

/// Attention of f32 and f64 on CUDA cores: 16 x 16 threads to tiles of kRows rows of either side,
/// rows padded with zeros to kDim: 32, 64, 128 or 256. Rows in shared memory are a pack longer, so
/// that 8 of them begin in 8 different groups of banks.
template <typename T, int kDim>
struct AttentionPlainShape {
  static constexpr int kSide = 16, kThreads = kSide * kSide;
  static constexpr int kPack = 16 / static_cast<int>(sizeof(T));
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(T));
  static constexpr int kRows = kRowBytes <= 128 ? 64 : kRowBytes <= 512 ? 32 : 16;
  static constexpr int kStride = kDim + kPack, kScoreStride = kRows + kPack;
  static constexpr int kBlocks = sizeof(T) > 4 ? 1 : 2;  // on a processor: what registers allow
  static constexpr int kTile = kRows * kStride, kScores = kRows * kScoreStride;
  static constexpr int shared_bytes(int tiles, int scores) {
    return (tiles * kTile + scores * kScores) * static_cast<int>(sizeof(T));
  }
};

/// Sums of grad_out * out: 8 threads to a row.
struct AttentionDeltaShape {
  static constexpr unsigned kThreads = 256;
  static constexpr int kTeam = 8, kTeams = kThreads / kTeam;
};

/// Of a grid that is a line: the tiles of a head, then the next head.
/// @throws Unsupported if there are more blocks than a launch takes
inline unsigned attention_blocks(const char* kernel, std::int64_t tiles, int heads, int batch) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::int64_t all_heads = std::int64_t{heads} * batch;
  require<Unsupported>(tiles == 0 || all_heads <= kMost / tiles,
                       "{}: {} tiles for each of {} heads in a batch of {} are more than a launch "
                       "takes ({})",
                       kernel, tiles, heads, batch, kMost);
  return static_cast<unsigned>(tiles * all_heads);
}

/// f(std::integral_constant<int, kDim>) with the least of the compiled kDims that holds `dim`.
/// @return  false if none does
template <int... kDims, typename F>
bool visit_head_dim(std::int64_t dim, const F& f) {
  bool found = false;
  (void)((dim <= kDims ? (f(std::integral_constant<int, kDims>{}), found = true) : false) || ...);
  return found;
}

}  // namespace tessera::kernels::cuda
