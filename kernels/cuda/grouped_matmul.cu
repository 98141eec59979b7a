// Products of groups of rows with a matrix each: a block owns a tile of a group's result, and finds
// its group by the offsets on the device. The grid has a tile more for each group than full tiles of
// all rows, so that it suffices for any offsets; blocks that are left over end at once. Operands go
// through shared memory, element by element, as rows along the summed dim whatever their order in
// memory. bf16 uses tensor cores; without asynchronous copies, it is bound by the loads.

#include "kernels/cuda/device/mma.h"
#include "kernels/cuda/device/unroll.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch/experts.h"
#include "kernels/grouped_matmul.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kSide = GroupedTile::kSide, kThreads = GroupedTile::kThreads;

/// A matrix [rows, depth] whose elements along one dim are adjacent.
template <typename T>
struct TileSource {
  const T* data;
  std::int64_t row_stride, depth_stride;
  std::int64_t rows, depth;
};

/// Tiles of both operands, and the product of their rows in registers. kDepth: the part of the summed
/// dim in a tile; kPitch: elements from row to row.
template <typename T>
struct TileProduct {
  static constexpr int kDepth = 16, kPitch = kDepth + 1;
  static constexpr int kRows = 8, kColumns = 4;  // of a thread
  Compute<T> sums[kRows][kColumns] = {};

  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / 16 * kRows; }
  static __device__ __forceinline__ int column() { return static_cast<int>(threadIdx.x) % 16; }
  __device__ __forceinline__ void add(const SharedArray<T>& a, const SharedArray<T>& b) {
    for (int k = 0; k < kDepth; ++k) {
      Compute<T> left[kRows], right[kColumns];
      TESSERA_UNROLL
      for (int i = 0; i < kRows; ++i) left[i] = widen(static_cast<T>(a[(row() + i) * kPitch + k]));
      TESSERA_UNROLL
      for (int j = 0; j < kColumns; ++j)
        right[j] = widen(static_cast<T>(b[(column() + 16 * j) * kPitch + k]));
      TESSERA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        TESSERA_UNROLL
        for (int j = 0; j < kColumns; ++j) sums[i][j] += left[i] * right[j];
      }
    }
  }
  /// Calls f(row, column, sum) for this thread's elements of the tile.
  template <typename F>
  __device__ __forceinline__ void for_each(const F& f) const {
    TESSERA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      TESSERA_UNROLL
      for (int j = 0; j < kColumns; ++j) f(row() + i, column() + 16 * j, sums[i][j]);
    }
  }
};

template <>
struct TileProduct<BFloat16> {
  static constexpr int kDepth = 32, kPitch = kDepth + 8;  // rows begin in different banks
  static constexpr int kM = 2, kN = 4;  // fragments of a warp, which owns a quarter of the tile
  FragmentC sums[kM][kN] = {};

  static __device__ __forceinline__ int row() {
    return static_cast<int>(threadIdx.x) / (2 * kWarpSize) * 32;
  }
  static __device__ __forceinline__ int column() {
    return static_cast<int>(threadIdx.x) / kWarpSize % 2 * 32;
  }
  __device__ __forceinline__ void add(const SharedArray<BFloat16>& a,
                                      const SharedArray<BFloat16>& b) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    TESSERA_UNROLL
    for (int k = 0; k < kDepth; k += 16) {
      FragmentA left[kM];
      TESSERA_UNROLL
      for (int m = 0; m < kM; ++m)
        load_matrices(left[m].x, a.from((row() + 16 * m + lane % 16) * kPitch + k + lane / 16 * 8));
      TESSERA_UNROLL
      for (int n = 0; n < kN; n += 2) {
        unsigned x[4];
        load_matrices(x, b.from((column() + 8 * n + lane / 16 * 8 + lane % 8) * kPitch + k +
                                lane / 8 % 2 * 8));
        TESSERA_UNROLL
        for (int m = 0; m < kM; ++m) {
          mma(sums[m][n], left[m], FragmentB{{x[0], x[1]}});
          mma(sums[m][n + 1], left[m], FragmentB{{x[2], x[3]}});
        }
      }
    }
  }
  template <typename F>
  __device__ __forceinline__ void for_each(const F& f) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    TESSERA_UNROLL
    for (int m = 0; m < kM; ++m) {
      TESSERA_UNROLL
      for (int n = 0; n < kN; ++n) {
        TESSERA_UNROLL
        for (int i = 0; i < 4; ++i)
          f(row() + 16 * m + i / 2 * 8 + lane / 4, column() + 8 * n + lane % 4 * 2 + i % 2,
            sums[m][n].x[i]);
      }
    }
  }
};

/// Loads kSide rows from `first_row` on and TileProduct's depth from `first` on, zeros beyond.
template <typename T>
__device__ __forceinline__ void load_tile(const SharedArray<T>& tile, const TileSource<T>& from,
                                          std::int64_t first_row, std::int64_t first) {
  using Product = TileProduct<T>;
  const bool along_depth = from.depth_stride == 1;
  for (int i = static_cast<int>(threadIdx.x); i < kSide * Product::kDepth; i += kThreads) {
    const int row = along_depth ? i / Product::kDepth : i % kSide;
    const int k = along_depth ? i % Product::kDepth : i / kSide;
    const bool exists = first_row + row < from.rows && first + k < from.depth;
    tile[row * Product::kPitch + k] =
        exists ? from.data[(first_row + row) * from.row_stride + (first + k) * from.depth_stride]
               : T{};
  }
}

/// Product a b^T of the tile at (row, column): both are [rows, depth].
template <typename T>
__device__ __forceinline__ TileProduct<T> product_of(const TileSource<T>& a, const TileSource<T>& b,
                                                     std::int64_t row, std::int64_t column) {
  using Product = TileProduct<T>;
  SharedMemory shared;
  const auto tile_a = shared.take<T>(kSide * Product::kPitch);
  const auto tile_b = shared.take<T>(kSide * Product::kPitch);
  Product product;
  for (std::int64_t first = 0; first < a.depth; first += Product::kDepth) {
    load_tile(tile_a, a, row, first);
    load_tile(tile_b, b, column, first);
    __syncthreads();
    product.add(tile_a, tile_b);
    __syncthreads();
  }
  return product;
}

template <typename T>
struct Matrices {
  T* at[kMostGroups];
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    grouped_matmul_kernel(const T* a, const std::int32_t* offsets, Matrices<const T> b, int groups,
                          T* c, std::int64_t depth, std::int64_t columns, bool transpose_b,
                          bool accumulate) {
  int group = 0, tile = static_cast<int>(blockIdx.y);
  for (; group < groups; ++group) {
    const int tiles = (offsets[group + 1] - offsets[group] + kSide - 1) / kSide;
    if (tile < tiles) break;
    tile -= tiles;
  }
  if (group == groups) return;
  const std::int64_t begin = offsets[group], rows = offsets[group + 1] - begin;
  const std::int64_t first_row = static_cast<std::int64_t>(tile) * kSide;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * kSide;
  const TileSource<T> left{a + begin * depth, depth, 1, rows, depth};
  const TileSource<T> right{b.at[group], transpose_b ? depth : 1, transpose_b ? 1 : columns,
                            columns, depth};
  product_of(left, right, first_row, first_column)
      .for_each([&](int row, int column, Compute<T> sum) {
        if (first_row + row >= rows || first_column + column >= columns) return;
        T* const to = c + (begin + first_row + row) * columns + first_column + column;
        *to = narrow<T>(accumulate ? sum + widen(*to) : sum);
      });
}

template <typename T>
struct Gradients {
  Compute<T>* at[kMostGroups];  // null: not wanted
  bool accumulate[kMostGroups];
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    grouped_gradient_kernel(const T* a, const T* b, const std::int32_t* offsets, Gradients<T> c,
                            std::int64_t rows, std::int64_t columns) {
  const int group = static_cast<int>(blockIdx.z);
  if (c.at[group] == nullptr) return;
  const std::int64_t begin = offsets[group], depth = offsets[group + 1] - begin;
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * kSide;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * kSide;
  const TileSource<T> left{a + begin * rows, 1, rows, rows, depth};
  const TileSource<T> right{b + begin * columns, 1, columns, columns, depth};
  product_of(left, right, first_row, first_column)
      .for_each([&](int row, int column, Compute<T> sum) {
        if (first_row + row >= rows || first_column + column >= columns) return;
        Compute<T>* const to = c.at[group] + (first_row + row) * columns + first_column + column;
        *to = c.accumulate[group] ? *to + sum : sum;
      });
}

template <typename T>
LaunchShape shape_of(const char* name, std::int64_t x, std::int64_t y, std::int64_t z) {
  require<Unsupported>(y <= GroupedTile::kMostY,
                       "{}: {} tiles of rows are more than a launch takes ({})", name, y,
                       GroupedTile::kMostY);
  return {.grid = static_cast<unsigned>(x),
          .block = kThreads,
          .shared_bytes = 2 * SharedMemory::shared_bytes<T>(kSide * TileProduct<T>::kPitch),
          .grid_y = static_cast<unsigned>(y),
          .grid_z = static_cast<unsigned>(z)};
}

const std::int32_t* first_offset(const TensorView& offsets, std::int64_t first) {
  return static_cast<const std::int32_t*>(offsets.data) + first;
}

}  // namespace

void grouped_matmul(Context& context, const GroupedMatmul& args) {
  visit_floating(args.a.dtype, "grouped_matmul", [&]<typename T>(std::type_identity<T>) {
    Matrices<const T> b{};
    for (std::int64_t i = 0; i < args.groups; ++i) b.at[i] = static_cast<const T*>(args.b[i].data);
    const std::int64_t columns = args.c.view.shape[1];
    launch(context, "grouped_matmul", grouped_matmul_kernel<T>,
           shape_of<T>("grouped_matmul", GroupedTile::tiles(columns),
                       GroupedTile::most_tiles(args.a.shape[0], args.groups), 1),
           static_cast<const T*>(args.a.data), first_offset(args.offsets, args.first), b,
           static_cast<int>(args.groups), static_cast<T*>(args.c.view.data), args.a.shape[1],
           columns, args.transpose_b, args.c.accumulate);
  });
}

void grouped_gradient(Context& context, const GroupedGradient& args) {
  visit_floating(args.a.dtype, "grouped_gradient", [&]<typename T>(std::type_identity<T>) {
    Gradients<T> c{};
    for (std::int64_t i = 0; i < args.groups; ++i) {
      c.at[i] = static_cast<Compute<T>*>(args.c[i].view.data);
      c.accumulate[i] = args.c[i].accumulate;
    }
    const std::int64_t rows = args.a.shape[1], columns = args.b.shape[1];
    launch(context, "grouped_gradient", grouped_gradient_kernel<T>,
           shape_of<T>("grouped_gradient", GroupedTile::tiles(columns), GroupedTile::tiles(rows),
                       args.groups),
           static_cast<const T*>(args.a.data), static_cast<const T*>(args.b.data),
           first_offset(args.offsets, args.first), c, rows, columns);
  });
}

TESSERA_CUDA_KERNEL(grouped_matmul, GroupedMatmul)
TESSERA_CUDA_KERNEL(grouped_gradient, GroupedGradient)

}  // namespace tessera::kernels::cuda
