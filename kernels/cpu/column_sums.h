#pragma once

#include <cstdint>

#include "kernels/cpu/loops.h"

TESSERA_CPU_BEGIN

/// Sums over rows, per column, for parameter gradients.
///
/// Each thread owns tiles of columns and walks down all rows, so the order of every sum is fixed,
/// whatever the number of threads, and no scratch memory is needed. Rows are summed in blocks
/// first, which keeps the rounding error near the square root of a plain running sum's.
///
/// @param term    term(row, column, A* sums): adds the row's kSums terms of that column
/// @param finish  finish(column, const A* sums): stores them
template <typename A, int kSums, typename Term, typename Finish>
void column_sums(Context& context, std::int64_t rows, std::int64_t columns, Term&& term,
                 Finish&& finish) {
  constexpr std::int64_t kTile = 64;
  constexpr std::int64_t kBlock = 64;
  for_rows(context, (columns + kTile - 1) / kTile, rows * kTile,
           [&](std::int64_t tile, std::int64_t end) {
             for (; tile < end; ++tile) {
               const std::int64_t first = tile * kTile;
               const std::int64_t width = std::min(kTile, columns - first);
               A total[kSums][kTile] = {};
               for (std::int64_t row = 0; row < rows; row += kBlock) {
                 A block[kSums][kTile] = {};
                 const std::int64_t last = std::min(rows, row + kBlock);
                 for (std::int64_t r = row; r < last; ++r) {
#pragma omp simd
                   for (std::int64_t c = 0; c < width; ++c) {
                     A sums[kSums];
                     for (int k = 0; k < kSums; ++k) sums[k] = block[k][c];
                     term(r, first + c, sums);
                     for (int k = 0; k < kSums; ++k) block[k][c] = sums[k];
                   }
                 }
                 for (int k = 0; k < kSums; ++k) {
                   for (std::int64_t c = 0; c < width; ++c) total[k][c] += block[k][c];
                 }
               }
               for (std::int64_t c = 0; c < width; ++c) {
                 A sums[kSums];
                 for (int k = 0; k < kSums; ++k) sums[k] = total[k][c];
                 finish(first + c, sums);
               }
             }
           });
}

TESSERA_CPU_END
