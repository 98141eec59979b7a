#pragma once

#include <algorithm>

#include "kernels/cpu/vector.h"

// The inner part of a matrix product: panels of the operands in the order in which they are read,
// and the tile of sums that stays in registers.
TESSERA_CPU_BEGIN

/// Rows and vectors of a tile: kTileRows x kTileVectors sums, the vectors of b and one element of a
/// fill the registers, and give each sum time to settle before it is used again.
inline constexpr int kTileRows = kRegisters == 32 ? 8 : 4;
inline constexpr int kTileVectors = kVectorBytes == 16 ? 2 : 3;
template <typename T>
inline constexpr int kTileColumns = kTileVectors* kLanes<T>;

/// Packs `rows` rows of a for `depth` terms: groups of kTileRows rows, [depth][kTileRows] each, the
/// last one filled up with zeros. Element (i, k) of a is data[i * stride + k], or, transposed,
/// data[k * stride + i].
template <typename T, typename E>
void pack_a(T* packed, const E* data, std::int64_t stride, bool transposed, std::int64_t rows,
            std::int64_t depth) {
  for (std::int64_t i = 0; i < rows; i += kTileRows, packed += depth * kTileRows) {
    const std::int64_t count = std::min<std::int64_t>(kTileRows, rows - i);
    if (!transposed) {
      if constexpr (kTileRows <= kLanes<T>) {
        copy_transposed<kTileRows>(packed, kTileRows, data + i * stride, stride, count, depth,
                                   T(1));
      } else {
        for (std::int64_t part = 0; part < kTileRows; part += kLanes<T>)
          copy_transposed<kLanes<T>>(packed + part, kTileRows, data + (i + part) * stride, stride,
                                     count - part, depth, T(1));
      }
      continue;
    }
    for (std::int64_t k = 0; k < depth; ++k) {
      const E* from = data + k * stride + i;
      for (std::int64_t r = 0; r < kTileRows; ++r)
        packed[k * kTileRows + r] = r < count ? static_cast<T>(load(from + r)) : T(0);
    }
  }
}

/// Packs `columns` columns of b for `depth` terms: panels [depth][kTileColumns], the last one
/// filled up with zeros. Element (k, j) of b is data[k * stride + j], or, transposed, data[j *
/// stride + k].
template <typename T, typename E>
void pack_b(T* packed, const E* data, std::int64_t stride, bool transposed, std::int64_t columns,
            std::int64_t depth) {
  constexpr int kWidth = kTileColumns<T>;
  for (std::int64_t j = 0; j < columns; j += kWidth, packed += depth * kWidth) {
    const std::int64_t count = std::min<std::int64_t>(kWidth, columns - j);
    if (transposed) {
      for (int part = 0; part < kWidth; part += kLanes<T>)
        copy_transposed<kLanes<T>>(packed + part, kWidth, data + (j + part) * stride, stride,
                                   count - part, depth, T(1));
      continue;
    }
    for (std::int64_t k = 0; k < depth; ++k) {
      const E* from = data + k * stride + j;
      T* to = packed + k * kWidth;
      if (count == kWidth) {
        for (int part = 0; part < kWidth; part += kLanes<T>)
          store_vector(to + part, load_vector<T>(from + part));
      } else {
        for (std::int64_t c = 0; c < kWidth; ++c)
          to[c] = c < count ? static_cast<T>(load(from + c)) : T(0);
      }
    }
  }
}

/// What is added to a tile of c besides its products.
template <typename T>
struct TileStart {
  bool add_c;
  const T* bias;  ///< null: none
};

/// c[rows][vectors] = products of the packed panels [+ c] [+ bias]. Every element is one sum in
/// order of depth, whatever the size of the tile.
template <int rows, int vectors, typename T>
void multiply_tile(const T* a, const T* b, std::int64_t depth, T* c, std::int64_t stride,
                   TileStart<T> start) {
  constexpr int kWidth = kLanes<T>;
  Vector<T> sums[rows][vectors] = {};
#pragma GCC unroll 4
  for (std::int64_t k = 0; k < depth; ++k) {
    Vector<T> line[vectors];
    for (int j = 0; j < vectors; ++j)
      line[j] = load_vector<T>(b + k * kTileColumns<T> + j * kWidth);
    for (int i = 0; i < rows; ++i) {
      const T value = a[k * kTileRows + i];
      for (int j = 0; j < vectors; ++j) sums[i][j] += value * line[j];
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) {
      T* to = c + i * stride + j * kWidth;
      Vector<T> sum = sums[i][j];
      if (start.bias != nullptr) sum += load_vector<T>(start.bias + j * kWidth);
      if (start.add_c) sum += load_vector<T>(to);
      store_vector(to, sum);
    }
  }
}

template <int rows, typename T>
void multiply_tile(int vectors, const T* a, const T* b, std::int64_t depth, T* c,
                   std::int64_t stride, TileStart<T> start) {
  if constexpr (kTileVectors == 3)
    if (vectors == 3) return multiply_tile<rows, 3>(a, b, depth, c, stride, start);
  if (vectors == 2) return multiply_tile<rows, 2>(a, b, depth, c, stride, start);
  multiply_tile<rows, 1>(a, b, depth, c, stride, start);
}

/// The smallest tile that holds `rows` rows; it writes up to kTileRows rows of c.
template <typename T>
void multiply_tile(std::int64_t rows, int vectors, const T* a, const T* b, std::int64_t depth, T* c,
                   std::int64_t stride, TileStart<T> start) {
  if constexpr (kTileRows == 8)
    if (rows > 4) return multiply_tile<8>(vectors, a, b, depth, c, stride, start);
  if (rows > 2) return multiply_tile<4>(vectors, a, b, depth, c, stride, start);
  if (rows == 2) return multiply_tile<2>(vectors, a, b, depth, c, stride, start);
  multiply_tile<1>(vectors, a, b, depth, c, stride, start);
}

/// A tile at the edge of c: computed aside, then the part that exists is copied.
template <typename T>
void multiply_edge(std::int64_t rows, std::int64_t columns, const T* a, const T* b,
                   std::int64_t depth, T* c, std::int64_t stride, TileStart<T> start) {
  constexpr int kWidth = kTileColumns<T>;
  T tile[kTileRows * kWidth];
  const int vectors = static_cast<int>((columns + kLanes<T> - 1) / kLanes<T>);
  if (start.add_c)
    for (std::int64_t i = 0; i < kTileRows; ++i)
      for (std::int64_t j = 0; j < kWidth; ++j)
        tile[i * kWidth + j] = i < rows && j < columns ? c[i * stride + j] : T(0);
  multiply_tile(rows, vectors, a, b, depth, tile, kWidth, start);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) c[i * stride + j] = tile[i * kWidth + j];
}

/// c[rows, columns] = products of packed a and packed b [+ c] [+ bias]; bias is padded to a
/// multiple of kTileColumns. A panel of b stays in the nearest cache while all of a passes by.
template <typename T>
void multiply_panels(std::int64_t rows, std::int64_t columns, std::int64_t depth, const T* a,
                     const T* b, T* c, std::int64_t stride, TileStart<T> start) {
  constexpr int kWidth = kTileColumns<T>;
  for (std::int64_t j = 0; j < columns; j += kWidth) {
    const std::int64_t width = std::min<std::int64_t>(kWidth, columns - j);
    const TileStart<T> tile_start{start.add_c, start.bias == nullptr ? nullptr : start.bias + j};
    for (std::int64_t i = 0; i < rows; i += kTileRows) {
      const std::int64_t height = std::min<std::int64_t>(kTileRows, rows - i);
      T* tile = c + i * stride + j;
      const bool whole = width % kLanes<T> == 0 &&
                         (height == kTileRows || height == 1 || height == 2 || height == 4);
      if (whole)
        multiply_tile(height, static_cast<int>(width / kLanes<T>), a + i * depth, b + j * depth,
                      depth, tile, stride, tile_start);
      else
        multiply_edge(height, width, a + i * depth, b + j * depth, depth, tile, stride, tile_start);
    }
  }
}

TESSERA_CPU_END
