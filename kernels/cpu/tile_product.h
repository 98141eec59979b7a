#pragma once

#include <algorithm>

#include "kernels/cpu/vector.h"

// Matrix products of small tiles in the L1 cache, without packing.
TESSERA_CPU_BEGIN

/// Rows of a tile of sums that fits the registers together with two vectors of b.
inline constexpr int kTileRows = kRegisters == 32 ? 8 : 4;

/// A tile whose element (i, j) is at data[i * row + j * column].
template <typename T>
struct TileOperand {
  const T* data;
  std::int64_t row, column;
};

template <int rows, int vectors, typename T>
inline void tile_block(TileOperand<T> a, std::int64_t depth, const T* b, std::int64_t b_stride,
                       T* c, std::int64_t c_stride, bool accumulate) {
  constexpr std::int64_t kWidth = kLanes<T>;
  Vector<T> sums[rows * vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows * vectors; ++i)
    sums[i] = accumulate ? load_vector<T>(c + i / vectors * c_stride + i % vectors * kWidth)
                         : Vector<T>{};
  for (std::int64_t k = 0; k < depth; ++k) {
    Vector<T> line[vectors];
    for (int j = 0; j < vectors; ++j) line[j] = load_vector<T>(b + k * b_stride + j * kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; ++i)
      sums[i] += a.data[i / vectors * a.row + k * a.column] * line[i % vectors];
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows * vectors; ++i)
    store_vector(c + i / vectors * c_stride + i % vectors * kWidth, sums[i]);
}

/// c [+]= a b. a [m, depth]; b [depth, n] and c [m, n] row-major, n a multiple of kLanes<T>, m a
/// multiple of kTileRows. Every element is summed in order of depth.
template <typename T>
void tile_product(std::int64_t m, std::int64_t n, std::int64_t depth, TileOperand<T> a, const T* b,
                  std::int64_t b_stride, T* c, std::int64_t c_stride, bool accumulate) {
  for (std::int64_t i = 0; i < m; i += kTileRows) {
    const TileOperand<T> rows{a.data + i * a.row, a.row, a.column};
    std::int64_t j = 0;
    for (; j + 2 * kLanes<T> <= n; j += 2 * kLanes<T>)
      tile_block<kTileRows, 2>(rows, depth, b + j, b_stride, c + i * c_stride + j, c_stride,
                               accumulate);
    if (j < n)
      tile_block<kTileRows, 1>(rows, depth, b + j, b_stride, c + i * c_stride + j, c_stride,
                               accumulate);
  }
}

TESSERA_CPU_END
