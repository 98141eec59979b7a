#pragma once

#include <cstdint>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector.h"

TESSERA_CPU_BEGIN

/// sums[k][c] += the terms of kRows rows, c in [0, width). A partial sum is loaded and stored
/// only once for these rows.
template <int kRows, typename A, int kSums, std::int64_t kTile, typename Term>
void add_rows(std::int64_t row, std::int64_t first, std::int64_t width, A (&sums)[kSums][kTile],
              const Term& term) {
  for_vectors<A>(width, [&]<typename V>(std::type_identity<V>, std::int64_t c) {
    V local[kSums];
    for (int k = 0; k < kSums; ++k) local[k] = load_as<V>(sums[k] + c);
    for (int i = 0; i < kRows; ++i) term(row + i, first + c, local);
    for (int k = 0; k < kSums; ++k) store_as(sums[k] + c, local[k]);
  });
}

/// Sums over rows, per column, for parameter gradients.
///
/// Each thread owns tiles of columns and walks down all rows, so the order of every sum is fixed,
/// whatever the number of threads, and no scratch memory is needed. Rows are summed in blocks
/// first, which keeps the rounding error near the square root of a plain running sum's.
///
/// @param term    term(row, column, V* sums): adds the row's kSums terms of columns column...; V as for load_as()
/// @param finish  finish(column, const A* sums): stores them
template <typename A, int kSums, typename Term, typename Finish>
void column_sums(Context& context, std::int64_t rows, std::int64_t columns, const Term& term,
                 const Finish& finish) {
  constexpr std::int64_t kTile = 512;  // columns of a thread at a time
  constexpr std::int64_t kGrain = 64;  // threads get multiples of it
  constexpr std::int64_t kBlock = 64;
  constexpr int kTogether = 8;
  const auto sum_tile = [&](std::int64_t first, std::int64_t width) {
    A total[kSums][kTile] = {};
    for (std::int64_t row = 0; row < rows; row += kBlock) {
      A block[kSums][kTile] = {};
      const std::int64_t last = std::min(rows, row + kBlock);
      std::int64_t r = row;
      for (; r + kTogether <= last; r += kTogether)
        add_rows<kTogether>(r, first, width, block, term);
      for (; r < last; ++r) add_rows<1>(r, first, width, block, term);
      for (int k = 0; k < kSums; ++k) {
#pragma omp simd
        for (std::int64_t c = 0; c < width; ++c) total[k][c] += block[k][c];
      }
    }
    for (std::int64_t c = 0; c < width; ++c) {
      A sums[kSums];
      for (int k = 0; k < kSums; ++k) sums[k] = total[k][c];
      finish(first + c, sums);
    }
  };
  for_rows(context, (columns + kGrain - 1) / kGrain, rows * kGrain,
           [&](std::int64_t begin, std::int64_t end) {
             const std::int64_t last = std::min(columns, end * kGrain);
             for (std::int64_t c = begin * kGrain; c < last; c += kTile)
               sum_tile(c, std::min(kTile, last - c));
           });
}

TESSERA_CPU_END
