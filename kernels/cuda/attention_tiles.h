#pragma once

#include <algorithm>
#include <bit>

#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/device/mma.h"
#include "kernels/cuda/device/unroll.h"
#include "kernels/cuda/launch/attention.h"

// Tiles of the tensor-core attention kernels: rows of heads in shared memory, padded with zeros to
// kDim and swizzled; and products of tiles, with sums in a warp's registers.
namespace tessera::kernels::cuda {

using Bf16Tile = SharedArray<BFloat16>;

/// Starts to load kRows rows of a head from row `first` on; rows from `rows` on become zeros.
template <int kThreads, int kRows, int kDim>
__device__ __forceinline__ void load_tile(const Bf16Tile& tile,
                                          const HeadsView<const BFloat16>& view, int batch,
                                          int first, int head, int rows, int dim) {
  // Computed first, because the key gradient's kernel spills registers otherwise.
  const BFloat16* from = view.at(batch, first, head);
  // Each thread copies one chunk of every kTogether-th row. With 12 or 24 chunks per row, some
  // threads are idle.
  constexpr int kChunks = kDim / 8;
  constexpr int kTogether = static_cast<int>(std::bit_floor(unsigned{kThreads / kChunks}));
  static_assert(kRows % kTogether == 0);
  const int thread = static_cast<int>(threadIdx.x);
  const int first_row = thread / kChunks, chunk = thread % kChunks;
  if (first_row >= kTogether) return;
  const int width = std::min(dim - chunk * 8, 8);
  const std::int64_t stride = view.token;
  from += first_row * stride + chunk * 8;
  if (view.packs) {
    TESSERA_UNROLL
    for (int row = first_row; row < first_row + kRows; row += kTogether) {
      const bool zeros = row >= rows || width <= 0;
      copy_async(tile.from(swizzled<kDim>(row, chunk)), from, zeros);
      from += kTogether * stride;
    }
  } else {
    TESSERA_KEEP_LOOP
    for (int row = first_row; row < kRows; row += kTogether) {
      const Bf16Tile to = tile.from(swizzled<kDim>(row, chunk));
      TESSERA_KEEP_LOOP
      for (int k = 0; k < 8; ++k) to[k] = row < rows && k < width ? from[k] : BFloat16{};
      from += kTogether * stride;
    }
  }
}

/// Writes columns [first_column, first_column + kColumns) of a warp's kRows rows to global memory.
template <int kRows, int kDim, int kColumns>
__device__ __forceinline__ void store_tile(const Bf16Tile& tile, int first_row, int first_column,
                                           BFloat16* to, std::int64_t stride, int rows, int dim,
                                           bool packs, bool accumulate) {
  constexpr int kChunks = kColumns / 8;
  TESSERA_KEEP_LOOP
  for (int i = static_cast<int>(threadIdx.x) % kWarpSize; i < kRows * kChunks; i += kWarpSize) {
    const int row = i / kChunks, column = first_column + i % kChunks * 8;
    if (row >= rows || column >= dim) continue;
    Pack<BFloat16, 8> pack = tile.load<8>(swizzled<kDim>(first_row + row, column / 8));
    BFloat16* const at = to + row * stride + column;
    if (packs) {
      if (accumulate) {
        const Pack<BFloat16, 8> before = load_pack<8>(at);
        for (int k = 0; k < 8; ++k) pack[k] = narrow<BFloat16>(widen(pack[k]) + widen(before[k]));
      }
      store_pack<8>(at, pack);
    } else {
      TESSERA_KEEP_LOOP
      for (int k = 0; k < 8; ++k) {
        if (column + k >= dim) break;
        at[k] = accumulate ? narrow<BFloat16>(widen(pack[k]) + widen(at[k])) : pack[k];
      }
    }
  }
}

/// Hides from the compiler that it returns x, so that values derived from the result are recomputed
/// instead of kept in registers.
__device__ __forceinline__ int recomputed(int x) {
#if !defined(TESSERA_FIBER)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

/// A lane's position in fragments.
struct Lane {
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int group = lane / 4, in_group = lane % 4;  // row and pair of columns of a FragmentC
};

/// sums[m][n] += a b^T over kDim, of 16 rows of tile a from a_row + 16 m, and 8 of tile b from 8 n.
template <int kDim, int M, int N>
__device__ __forceinline__ void add_product_of_rows(FragmentC (&sums)[M][N], const Bf16Tile& a,
                                                    int a_row, const Bf16Tile& b) {
  static_assert(N % 2 == 0);
  const int lane = recomputed(Lane().lane);
  TESSERA_UNROLL
  for (int k = 0; k < kDim / 16; ++k) {
    FragmentA left[M];
    TESSERA_UNROLL
    for (int m = 0; m < M; ++m)
      load_matrices(left[m].x,
                    a.from(swizzled<kDim>(a_row + 16 * m + lane % 16, (2 * k) ^ (lane / 16))));
    TESSERA_UNROLL
    for (int n = 0; n < N; n += 2) {
      unsigned x[4];
      load_matrices(
          x, b.from(swizzled<kDim>(8 * n + lane / 16 * 8 + lane % 8, (2 * k) ^ (lane / 8 % 2))));
      TESSERA_UNROLL
      for (int m = 0; m < M; ++m) {
        mma(sums[m][n], left[m], FragmentB{x[0], x[1]});
        mma(sums[m][n + 1], left[m], FragmentB{x[2], x[3]});
      }
    }
  }
}

/// Columns 16 j to 16 j + 15 of a matrix product, as the left operand of the next product.
template <int N>
__device__ __forceinline__ FragmentA as_left(const FragmentC (&weights)[N], int j) {
  const float(&low)[4] = weights[2 * j].x;
  const float(&high)[4] = weights[2 * j + 1].x;
  return {{pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
           pack_bf16(high[2], high[3])}};
}

/// sums[m][n] += weights b, for 8 columns of b from 8 (first_chunk + n); rounds weights to bf16.
template <int kDim, int M, int K, int N>
__device__ __forceinline__ void add_weighted_rows(FragmentC (&sums)[M][N],
                                                  const FragmentC (&weights)[M][K],
                                                  const Bf16Tile& b, int first_chunk) {
  static_assert(K % 2 == 0 && N % 2 == 0);
  const int lane = recomputed(Lane().lane);
  TESSERA_UNROLL
  for (int k = 0; k < K / 2; ++k) {
    FragmentA left[M];
    TESSERA_UNROLL
    for (int m = 0; m < M; ++m) left[m] = as_left(weights[m], k);
    TESSERA_UNROLL
    for (int n = 0; n < N; n += 2) {
      unsigned x[4];
      load_matrices_transposed(
          x, b.from(swizzled<kDim>(16 * k + lane % 16, (first_chunk + n) ^ (lane / 16))));
      TESSERA_UNROLL
      for (int m = 0; m < M; ++m) {
        mma(sums[m][n], left[m], FragmentB{x[0], x[1]});
        mma(sums[m][n + 1], left[m], FragmentB{x[2], x[3]});
      }
    }
  }
}

/// Writes factors * sums, rounded to bf16, to rows of a tile from first_row on, columns from
/// 8 first_chunk on.
template <int kDim, int M, int N>
__device__ __forceinline__ void put_rows(const Bf16Tile& tile, int first_row, int first_chunk,
                                         const FragmentC (&sums)[M][N],
                                         const float (&factors)[M][2]) {
  const Lane at;
  TESSERA_UNROLL
  for (int m = 0; m < M; ++m) {
    TESSERA_UNROLL
    for (int n = 0; n < N; ++n) {
      TESSERA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + 16 * m + 8 * half + at.group;
        const float* const x = sums[m][n].x + 2 * half;
        tile.store<2>(swizzled<kDim>(row, first_chunk + n) + 2 * at.in_group,
                      Pack<BFloat16, 2>{{narrow<BFloat16>(x[0] * factors[m][half]),
                                         narrow<BFloat16>(x[1] * factors[m][half])}});
      }
    }
  }
}

}  // namespace tessera::kernels::cuda
