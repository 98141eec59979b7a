#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/shared.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch/column_sums.h"
#include "kernels/workspace.h"

// Sums over rows, per column, for parameter gradients; the counterpart of
// kernels/cpu/column_sums.h. Each block sums its rows, then a second kernel adds these sums. No
// atomics: the order of every sum depends on the sizes only. Memory-bound: reads the matrix once.
namespace tessera::kernels::cuda {

/// Calls term(row, column, sums, integral_constant<int, N>), which adds N columns of a row, from
/// `column` on, to A sums[kSums][N]; then finish(row_block, integral_constant<int, k>, column, sum)
/// for sum k of each column. 32 warps run per multiprocessor, because more would spill registers.
template <typename A, int kSums, int N, int kWarps, typename Term, typename Finish>
__global__ void __launch_bounds__(kWarps* kWarpSize, 32 / kWarps)
    column_sums_kernel(std::int64_t rows, std::int64_t columns, std::int64_t rows_per_block,
                       Term term, Finish finish) {
  constexpr int kTile = kWarpSize * N;
  constexpr int kTogether = ColumnSumsShape::kTogether;
  constexpr int kPart = N < kPack<A> ? N : kPack<A>;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const std::int64_t column = tile + lane * N;
  const std::int64_t begin = blockIdx.y * rows_per_block;
  const std::int64_t end = begin + rows_per_block < rows ? begin + rows_per_block : rows;

  A sums[kSums][N] = {};
  if (column < columns) {
    std::int64_t row = begin + warp;
    for (; row + (kTogether - 1) * kWarps < end; row += kTogether * kWarps) {
      for (int i = 0; i < kTogether; ++i)
        term(row + i * kWarps, column, sums, std::integral_constant<int, N>{});
    }
    for (; row < end; row += kWarps) term(row, column, sums, std::integral_constant<int, N>{});
  }

  SharedMemory memory;
  const SharedArray<A> shared = memory.take<A>(kWarps * kTile);
  const auto combine = [&]<int k>(std::integral_constant<int, k> which) {
    if constexpr (k > 0) __syncthreads();
    for (int i = 0; i < N; i += kPart) {
      Pack<A, kPart> part;
      for (int j = 0; j < kPart; ++j) part[j] = sums[k][i + j];
      shared.template store<kPart>(warp * kTile + lane * N + i, part);
    }
    __syncthreads();
    for (int c = thread; c < kTile && tile + c < columns; c += kWarps * kWarpSize) {
      A sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += shared[w * kTile + c];
      finish(static_cast<std::int64_t>(blockIdx.y), which, tile + c, sum);
    }
  };
  combine(std::integral_constant<int, 0>{});
  if constexpr (kSums > 1) combine(std::integral_constant<int, 1>{});
  static_assert(kSums <= 2);
}

/// Partial sums, [row_blocks, kSums, columns].
template <typename A, int kSums>
struct PartialColumnSums {
  A* data;
  std::int64_t columns;

  template <int k>
  __device__ __forceinline__ void operator()(std::int64_t row_block, std::integral_constant<int, k>,
                                             std::int64_t column, A sum) const {
    data[(row_block * kSums + k) * columns + column] = sum;
  }
  __device__ __forceinline__ void operator()(std::int64_t row_block, std::int64_t column,
                                             A (&sums)[kSums][1],
                                             std::integral_constant<int, 1>) const {
    for (int k = 0; k < kSums; ++k) sums[k][0] += data[(row_block * kSums + k) * columns + column];
  }
};

/// Overwrites or adds to each of kSums gradients; skips those that are null.
template <typename A, int kSums>
struct StoreColumnSums {
  A* to[kSums];
  bool accumulate[kSums];

  template <int k>
  __device__ __forceinline__ void operator()(std::int64_t, std::integral_constant<int, k>,
                                             std::int64_t column, A sum) const {
    if (to[k] == nullptr) return;
    to[k][column] = accumulate[k] ? to[k][column] + sum : sum;
  }
};

template <typename A>
LaunchShape column_sums_grid(std::int64_t tiles, std::int64_t row_blocks, int warps, int pack) {
  return {.grid = static_cast<unsigned>(tiles),
          .block = static_cast<unsigned>(warps * kWarpSize),
          .shared_bytes = SharedMemory::shared_bytes<A>(warps * kWarpSize * pack),
          .grid_y = static_cast<unsigned>(row_blocks)};
}

/// Sums the partial sums in the order of the blocks, and stores them.
template <typename A, int kSums>
void launch_sum_of_partials(Context& context, const char* name, std::int64_t row_blocks,
                            std::int64_t columns, const PartialColumnSums<A, kSums>& partial,
                            const StoreColumnSums<A, kSums>& store) {
  constexpr int kWarps = ColumnSumsShape::kFinalWarps;
  launch(context, name,
         column_sums_kernel<A, kSums, 1, kWarps, PartialColumnSums<A, kSums>,
                            StoreColumnSums<A, kSums>>,
         column_sums_grid<A>((columns + kWarpSize - 1) / kWarpSize, 1, kWarps, 1), row_blocks,
         columns, row_blocks, partial, store);
}

/// Runs a term as above over all rows and stores the sums; zeros if there are no rows. Uses at most
/// kBlocks * 32 * N * kSums elements of scratch memory.
/// @param N  columns at a time; must divide `columns`
template <typename A, int kSums, int N, typename Term>
void launch_column_sums(Context& context, const char* name, std::int64_t rows, std::int64_t columns,
                        const Term& term, const StoreColumnSums<A, kSums>& store) {
  using Shape = ColumnSumsShape;
  const Shape shape(rows, columns, N);
  if (shape.tiles == 0) return;
  if (shape.partials() == 0) {
    launch(context, name,
           column_sums_kernel<A, kSums, N, Shape::kWarps, Term, StoreColumnSums<A, kSums>>,
           column_sums_grid<A>(shape.tiles, 1, Shape::kWarps, N), rows, columns, rows, term, store);
    return;
  }
  using Partial = PartialColumnSums<A, kSums>;
  const std::int64_t elements = shape.partials() * kSums * columns;
  const Workspace scratch(context, static_cast<std::size_t>(elements) * sizeof(A), name);
  const Partial partial{static_cast<A*>(scratch.data()), columns};
  launch(context, name, column_sums_kernel<A, kSums, N, Shape::kWarps, Term, Partial>,
         column_sums_grid<A>(shape.tiles, shape.row_blocks, Shape::kWarps, N), rows, columns,
         shape.rows_per_block, term, partial);
  launch_sum_of_partials(context, name, shape.row_blocks, columns, partial, store);
}

}  // namespace tessera::kernels::cuda
