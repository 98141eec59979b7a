#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/shared.h"
#include "kernels/cuda/device/unroll.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch/column_sums.h"
#include "kernels/workspace.h"

// Sums over rows, per column, for parameter gradients; the counterpart of
// kernels/cpu/column_sums.h. Each block sums its rows, then a second kernel adds these sums. No
// atomics: the order of every sum depends on the sizes only. Memory-bound: reads the matrix once.
namespace tessera::kernels::cuda {

/// Calls term(row, column, sums, integral_constant<int, N>), which adds N columns of a row, from
/// `column` on, to A sums[kSums][N]; then finish(row_block, k * columns + column, sum) for sum k of
/// each column. 32 warps run per multiprocessor, because more would spill registers.
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
  for (int k = 0; k < kSums; ++k) {
    if (k > 0) __syncthreads();
    for (int i = 0; i < N; i += kPart) {
      Pack<A, kPart> part;
      for (int j = 0; j < kPart; ++j) part[j] = sums[k][i + j];
      shared.template store<kPart>(warp * kTile + lane * N + i, part);
    }
    __syncthreads();
    for (int c = thread; c < kTile && tile + c < columns; c += kWarps * kWarpSize) {
      A sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += shared[w * kTile + c];
      finish(static_cast<std::int64_t>(blockIdx.y), k * columns + tile + c, sum);
    }
  }
}

/// Partial sums, [row_blocks, columns], where several sums of a column follow each other as columns.
template <typename A>
struct PartialColumnSums {
  A* data;
  std::int64_t columns;

  __device__ __forceinline__ void operator()(std::int64_t row_block, std::int64_t column,
                                             A sum) const {
    data[row_block * columns + column] = sum;
  }
  __device__ __forceinline__ void operator()(std::int64_t row_block, std::int64_t column,
                                             A (&sums)[1][1],
                                             std::integral_constant<int, 1>) const {
    sums[0][0] += data[row_block * columns + column];
  }
};

/// Overwrites or adds to gradients of `columns` elements each; skips those that are null. Column
/// k * columns + c is element c of gradient k.
template <typename A>
struct StoreColumnSums {
  static constexpr int kMost = 3;
  std::int64_t columns;
  A* to[kMost] = {};
  bool accumulate[kMost] = {};

  __device__ __forceinline__ void operator()(std::int64_t, std::int64_t column, A sum) const {
    // A variable k would place the arrays on the stack.
    TESSERA_UNROLL
    for (int k = 0; k < kMost; ++k) {
      const std::int64_t c = column - k * columns;
      if (c < 0 || c >= columns || to[k] == nullptr) continue;
      to[k][c] = accumulate[k] ? to[k][c] + sum : sum;
    }
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
template <typename A>
void launch_sum_of_partials(Context& context, const char* name, std::int64_t row_blocks,
                            const PartialColumnSums<A>& partial, const StoreColumnSums<A>& store) {
  constexpr int kWarps = ColumnSumsShape::kFinalWarps;
  launch(context, name,
         column_sums_kernel<A, 1, 1, kWarps, PartialColumnSums<A>, StoreColumnSums<A>>,
         column_sums_grid<A>((partial.columns + kWarpSize - 1) / kWarpSize, 1, kWarps, 1),
         row_blocks, partial.columns, row_blocks, partial, store);
}

/// Runs a term as above over all rows and stores the sums; zeros if there are no rows. Uses at most
/// kBlocks * 32 * N * kSums elements of scratch memory.
/// @param N  columns at a time; must divide store.columns
template <typename A, int kSums, int N, typename Term>
void launch_column_sums(Context& context, const char* name, std::int64_t rows, const Term& term,
                        const StoreColumnSums<A>& store) {
  using Shape = ColumnSumsShape;
  const std::int64_t columns = store.columns;
  const Shape shape(rows, columns, N);
  if (shape.tiles == 0) return;
  if (shape.partials() == 0) {
    launch(context, name, column_sums_kernel<A, kSums, N, Shape::kWarps, Term, StoreColumnSums<A>>,
           column_sums_grid<A>(shape.tiles, 1, Shape::kWarps, N), rows, columns, rows, term, store);
    return;
  }
  using Partial = PartialColumnSums<A>;
  const std::int64_t elements = shape.partials() * kSums * columns;
  const Workspace scratch(context, static_cast<std::size_t>(elements) * sizeof(A), name);
  const Partial partial{static_cast<A*>(scratch.data()), kSums * columns};
  launch(context, name, column_sums_kernel<A, kSums, N, Shape::kWarps, Term, Partial>,
         column_sums_grid<A>(shape.tiles, shape.row_blocks, Shape::kWarps, N), rows, columns,
         shape.rows_per_block, term, partial);
  launch_sum_of_partials(context, name, shape.row_blocks, partial, store);
}

/// The rows of a matrix, in rows `stride` elements apart.
template <typename T>
struct SumRowsTerm {
  const T* in;
  std::int64_t stride;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t row, std::int64_t column,
                                             Compute<T> (&sums)[1][N],
                                             std::integral_constant<int, N>) const {
    const Pack<T, N> pack = load_pack<N>(in + row * stride + column);
    for (int k = 0; k < N; ++k) sums[0][k] += widen(pack[k]);
  }
};

}  // namespace tessera::kernels::cuda
