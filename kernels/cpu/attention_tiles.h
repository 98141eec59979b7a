#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/attention.h"
#include "kernels/cpu/pair_product.h"
#include "kernels/cpu/tile_product.h"
#include "kernels/cpu/vector.h"
#include "kernels/cpu/visit.h"

// Operands of attention's products on the CPU: a head's tokens as tiles, either of the accumulator type
// (PlainTiles), or of pairs of bf16 numbers (PairTiles, with AVX512-BF16), which also round weights and scores'
// gradients to bf16, as flash attention does on GPUs.
TESSERA_CPU_BEGIN

using Index = std::int64_t;

inline constexpr Index kQueries = 32;  // rows of a tile of scores
inline constexpr Index kKeys = 64;     // columns of a tile of scores

/// The number of score columns is rounded up to this: to whole vectors, and to whole kTileRows,
/// because backward also uses the columns as rows.
template <typename T>
inline constexpr Index kKeyStep = std::max<Index>(kLanes<T>, kTileRows);

/// One head of a [B, T, H, D] view.
template <typename E>
struct Head {
  E* data;
  Index stride;  // between tokens
  E* row(Index token) const { return data + token * stride; }
};
template <typename E>
Head<E> head_of(const TensorView& view, Index batch, Index head) {
  auto* data = static_cast<std::remove_const_t<E>*>(view.data);
  return {data + batch * view.strides[0] + head * view.strides[2], view.strides[1]};
}

struct Sizes {
  Index batch, queries, keys, heads, kv_heads, dim;
  Index padded_keys, padded_dim;
  Index slot_rows = 0;  // that a thread computes at a time, with few queries
  Index group() const { return heads / kv_heads; }
};
template <typename T>
Sizes sizes_of(const TensorView& q, const TensorView& k) {
  return {q.shape[0],
          q.shape[1],
          k.shape[1],
          q.shape[2],
          k.shape[2],
          q.shape[3],
          round_up(k.shape[1], kKeys),
          round_up(q.shape[3], kLanes<T>)};
}

/// Allocates a thread's scratch memory, aligned to 64 bytes. If begin is null, only adds up sizes.
template <typename T>
class Scratch {
 public:
  explicit Scratch(T* begin) : begin_(begin) {}
  T* take(Index elements) {
    T* part = begin_ == nullptr ? nullptr : begin_ + used_;
    used_ += round_up(elements, 64 / static_cast<Index>(sizeof(T)));
    return part;
  }
  Index used() const { return used_; }

 private:
  T* begin_;
  Index used_ = 0;
};

/// Products of a tile of queries (in backward, of their result's gradients) with tiles of keys (values) of a head.
template <typename T>
class PlainDots {
 public:
  PlainDots(Scratch<T>& scratch, const Sizes& s)
      : keys_(scratch.take(s.dim * s.padded_keys)), queries_(scratch.take(s.dim * kQueries)) {}

  template <typename E>
  void load_keys(Head<const E> head, const Sizes& s) const {
    for (Index key = 0; key < s.padded_keys; key += kKeys)
      copy_columns<E>(keys_ + key * s.dim, kKeys, head, key, s.keys - key, kKeys, s.dim, T(1));
  }
  template <typename E>
  void load_queries(Head<const E> head, Index first, Index count, const Sizes& s, T scale) const {
    copy_columns<E>(queries_, kQueries, head, first, count, kQueries, s.dim, scale);
  }
  /// products [rows, kKeys] of queries from `row` on with keys [key, key + columns); `scale` as given to
  /// load_queries()
  void multiply(Index row, Index rows, Index columns, Index key, const Sizes& s, T* products,
                T /*scale*/) const {
    tile_product<T>(rows, columns, s.dim, {queries_ + row, 1, kQueries}, keys_ + key * s.dim, kKeys,
                    products, kKeys, false);
  }

 private:
  /// tile[d][i] = scale * head[first + i][d]; columns i >= count are zero.
  template <typename E>
  static void copy_columns(T* tile, Index tile_stride, Head<const E> head, Index first, Index count,
                           Index columns, Index dim, T scale) {
    for (Index i = 0; i < columns; i += kLanes<T>)
      copy_transposed<kLanes<T>>(tile + i, tile_stride, head.row(first + i), head.stride, count - i,
                                 dim, scale);
  }

  // Transposed, as tiles [dim, kKeys]: rows as long as all keys would lie at distances that share few sets of
  // the cache. The tile of key i begins at i * dim.
  T* keys_;
  T* queries_;  // [dim, kQueries], scaled
};

/// Tokens of a head as rows that a tile of weights sums up.
template <typename T>
class PlainRows {
 public:
  PlainRows(Scratch<T>& scratch, Index rows, const Sizes& s)
      : rows_(scratch.take(rows * s.padded_dim)) {}

  /// Rows [0, padded) are tokens from `first` on; rows i >= count are zero.
  template <typename E>
  void load_rows(Head<const E> head, Index first, Index count, Index padded, const Sizes& s) const {
    for (Index i = 0; i < padded; ++i) {
      T* to = rows_ + i * s.padded_dim;
      const E* from = head.row(first + i);
      const Index filled = i < count ? s.dim : 0;
      Index d = 0;
      for (; d + kLanes<T> <= filled; d += kLanes<T>)
        store_vector(to + d, load_vector<T>(from + d));
      for (; d < filled; ++d) to[d] = static_cast<T>(load(from + d));
      for (; d < s.padded_dim; ++d) to[d] = 0;
    }
  }
  /// sums [m, padded_dim] += weights [m, depth] times rows [row, row + depth). The weights are stored as
  /// [m, kKeys], or transposed as [depth, kKeys].
  template <bool transposed>
  void add(Index m, Index depth, Index row, const T* weights, const Sizes& s, T* sums) const {
    const TileOperand<T> a =
        transposed ? TileOperand<T>{weights, 1, kKeys} : TileOperand<T>{weights, kKeys, 1};
    tile_product<T>(m, s.padded_dim, depth, a, rows_ + row * s.padded_dim, s.padded_dim, sums,
                    s.padded_dim, true);
  }

 private:
  T* rows_;  // [rows, padded_dim]
};

template <typename T>
struct PlainTiles {
  using Element = T;
  using Dots = PlainDots<T>;
  using Rows = PlainRows<T>;
};

#if defined(__AVX512F__)

inline Pair* take_pairs(Scratch<float>& scratch, Index count) {
  return reinterpret_cast<Pair*>(scratch.take(count));
}

/// As PlainDots, but products are scaled, not queries.
class PairDots {
 public:
  PairDots(Scratch<float>& scratch, const Sizes& s)
      : keys_(take_pairs(scratch, pairs(s) * s.padded_keys)),
        queries_(take_pairs(scratch, pairs(s) * kQueries)) {}

  void load_keys(Head<const BFloat16> head, const Sizes& s) const {
    constexpr Index kWidth = kLanes<float>;
    for (Index key = 0; key < s.padded_keys; key += kWidth) {
      Pair* const to = keys_ + key / kKeys * kKeys * pairs(s) + key % kKeys;
      for (Index p = 0; p < pairs(s); p += kWidth) {
        Vector<float> v[kWidth] = {};  // pairs are moved as floats
        for (Index i = 0; i < std::min(kWidth, s.keys - key); ++i)
          std::memcpy(
              &v[i], head.row(key + i) + 2 * p,
              static_cast<std::size_t>(std::min(2 * kWidth, s.dim - 2 * p)) * sizeof(BFloat16));
        transpose<float>(v);
        for (Index j = 0; j < std::min(kWidth, pairs(s) - p); ++j)
          std::memcpy(to + (p + j) * kKeys, &v[j], sizeof(v[j]));
      }
    }
  }
  void load_queries(Head<const BFloat16> head, Index first, Index count, const Sizes& s,
                    float /*scale*/) const {
    std::fill_n(queries_, kQueries * pairs(s), Pair{0});
    for (Index i = 0; i < count; ++i)
      std::memcpy(queries_ + i * pairs(s), head.row(first + i),
                  static_cast<std::size_t>(s.dim) * sizeof(BFloat16));
  }
  void multiply(Index row, Index rows, Index columns, Index key, const Sizes& s, float* products,
                float scale) const {
    pair_product<false>(rows, columns, pairs(s), {queries_ + row * pairs(s), pairs(s), 1},
                        keys_ + key * pairs(s), kKeys, products, kKeys, scale);
  }

 private:
  static Index pairs(const Sizes& s) { return (s.dim + 1) / 2; }
  Pair* keys_;     // tiles [pairs, kKeys]; that of key i begins at i * pairs
  Pair* queries_;  // [kQueries, pairs]
};

/// As PlainRows; `padded`, `depth` and `row` are even.
class PairRows {
 public:
  PairRows(Scratch<float>& scratch, Index rows, const Sizes& s)
      : rows_(take_pairs(scratch, rows / 2 * s.padded_dim)),
        weights_(take_pairs(scratch, kQueries * kKeys / 2)) {}

  void load_rows(Head<const BFloat16> head, Index first, Index count, Index padded,
                 const Sizes& s) const {
    using Bits = Pair __attribute__((vector_size(kVectorBytes)));
    for (Index i = 0; i < padded; i += 2) {
      Pair* const to = rows_ + i / 2 * s.padded_dim;
      const Index filled = i < count ? s.dim : 0;
      const BFloat16* const even = head.row(first + i);
      const BFloat16* const odd = i + 1 < count ? head.row(first + i + 1) : nullptr;
      Index d = 0;
      for (; odd != nullptr && d + kLanes<float> <= filled; d += kLanes<float>) {
        const Bits low = std::bit_cast<Bits>(load_vector<float>(even + d)) >> 16;
        const Bits pairs = std::bit_cast<Bits>(load_vector<float>(odd + d)) | low;
        std::memcpy(to + d, &pairs, sizeof(pairs));
      }
      for (; d < filled; ++d)
        to[d] = even[d].bits | static_cast<Pair>(odd != nullptr ? odd[d].bits : 0) << 16;
      for (; d < s.padded_dim; ++d) to[d] = 0;
    }
  }
  template <bool transposed>
  void add(Index m, Index depth, Index row, const float* weights, const Sizes& s,
           float* sums) const {
    PairOperand a{weights_, kKeys / 2, 1};
    if (transposed) {
      for (Index i = 0; i < depth; i += 2)
        pair_up(weights + i * kKeys, weights + (i + 1) * kKeys, m, weights_ + i / 2 * kKeys);
      a = {weights_, 1, kKeys};
    } else {
      for (Index i = 0; i < m; ++i) round_row(weights + i * kKeys, depth, weights_ + i * kKeys / 2);
    }
    pair_product<true>(m, s.padded_dim, depth / 2, a, rows_ + row / 2 * s.padded_dim, s.padded_dim,
                       sums, s.padded_dim, 1);
  }

 private:
  Pair* rows_;     // [rows / 2, padded_dim]: pairs of rows 2 i and 2 i + 1
  Pair* weights_;  // rounded, one tile
};

struct PairTiles {
  using Element = float;
  using Dots = PairDots;
  using Rows = PairRows;
};

#endif

TESSERA_CPU_END
