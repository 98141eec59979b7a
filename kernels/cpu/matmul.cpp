#include "kernels/matmul.h"

#include <algorithm>

#include "kernels/cpu/product_tile.h"
#include "kernels/cpu/visit.h"
#include "kernels/workspace.h"

// c is cut into blocks of columns (and rows, where there are too few columns) that threads compute
// on their own. a (a slab of it, if it is large) is packed once and shared by the threads; each
// thread packs its blocks of b. bf16 becomes f32 while it is packed.
//
// An element of c is a sum of sums over kDepth terms each, in order. Neither the number of threads
// nor that of rows in the call changes its bits.
// Blocking after Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication".
//
// Why not Eigen's products: on a 2-core AVX-512 machine (g++ 12, -march=x86-64-v4, one thread, of
// 213 GFLOP/s that register-only fused multiply-adds reach) Eigen 3.4's inner kernel made 130 to
// 147 GFLOP/s at 512 and 1536 cubed, these tiles 175 to 185 on packed panels; its rounding depends
// on where a column lies in its block; and its outer loops allocate outside the memory ledger.
TESSERA_CPU_BEGIN
namespace {

using Index = std::int64_t;

constexpr Index kDepth = 384;          // terms of a packed block: kDepth x kColumns of b and
constexpr Index kCachedRows = 256;     // kCachedRows x kDepth of a fit the L2 cache together
constexpr Index kSlabDepth = 3840;     // terms for which a is packed at a time
constexpr Index kMaxPacked = 8 << 20;  // elements of a that are packed at a time
constexpr Index kPackRows = 64;        // of a, packed at a time: a unit of work for a thread
template <typename T>
constexpr Index kColumns = 8 * kTileColumns<T>;  // of c in a block, at most

/// A row-major matrix, or its transpose.
template <typename E>
struct Operand {
  const E* data;
  Index stride;
  bool transposed;
  const E* at(Index row, Index column) const {
    return transposed ? data + column * stride + row : data + row * stride + column;
  }
};

/// How c is cut into blocks: as many as there are threads, or a multiple, where c is large enough.
struct Grid {
  Index rows, columns;  // in a block
  Index row_blocks, column_blocks;
};

template <typename T>
Grid make_grid(Index m, Index n, Index threads) {
  constexpr Index kWidth = kTileColumns<T>;
  const Index wide_enough = std::max<Index>(1, n / (2 * kWidth));
  Grid grid{};
  if (wide_enough >= threads) {
    grid.column_blocks = round_up((n + kColumns<T> - 1) / kColumns<T>, threads);
    grid.row_blocks = 1;
  } else {
    grid.column_blocks = std::max(wide_enough, (n + kColumns<T> - 1) / kColumns<T>);
    grid.row_blocks = (threads + grid.column_blocks - 1) / grid.column_blocks;
  }
  grid.columns = round_up((n + grid.column_blocks - 1) / grid.column_blocks, kWidth);
  grid.column_blocks = (n + grid.columns - 1) / grid.columns;
  grid.rows = round_up((m + grid.row_blocks - 1) / grid.row_blocks, kTileRows);
  grid.row_blocks = (m + grid.rows - 1) / grid.rows;
  return grid;
}

/// E: type of the operands, T: of the sums, C: of the result.
template <typename E, typename T, typename C>
class Product {
 public:
  Product(Context& context, const Matmul& args)
      : context_(context),
        a_{static_cast<const E*>(args.a.data), args.a.strides[0], args.transpose_a},
        b_{static_cast<const E*>(args.b.data), args.b.strides[0], args.transpose_b},
        c_(static_cast<C*>(args.c.data)),
        c_stride_(args.c.strides[0]),
        bias_(static_cast<const E*>(args.bias.data)),
        accumulate_(args.accumulate),
        m_(args.c.shape[0]),
        n_(args.c.shape[1]),
        k_(args.a.shape[args.transpose_a ? 0 : 1]) {}

  void run() {
    // With c in another type than the sums, a block is summed up over all of k at once.
    const Index max_depth = kConvertsC ? k_ : std::min(k_, kSlabDepth);
    const Index max_rows =
        std::max(kPackRows, kMaxPacked / std::max<Index>(max_depth, 1) / kPackRows * kPackRows);
    for (Index row = 0; row < m_; row += max_rows) {
      Index k = 0;
      do {  // at least once: with no terms c is still written
        const Index depth = std::min(max_depth, k_ - k);
        run_slab({row, std::min(max_rows, m_ - row), k, depth});
        k += depth;
      } while (k < k_);
    }
  }

 private:
  static constexpr bool kConvertsC = !std::is_same_v<C, T>;

  /// Rows of c and terms of its sums that are worked on at a time.
  struct Slab {
    Index row, rows, k, depth;
  };
  struct Block {
    Index row, rows, column, columns;  // row within the slab
  };

  void run_slab(const Slab& slab) {
    ThreadPool& pool = context_.threads();
    const Index threads = pool.size();
    const Grid grid = make_grid<T>(slab.rows, n_, threads);
    const Index blocks = grid.row_blocks * grid.column_blocks;
    const Index slots = std::min(threads, blocks);
    const Index packed_size = round_up(slab.rows, kTileRows) * slab.depth;
    const Index bias_size = bias_ == nullptr ? 0 : round_up(n_, kTileColumns<T>);
    const Index panel = grid.columns * std::min(slab.depth, kDepth);
    const Index result = kConvertsC ? grid.rows * grid.columns : 0;
    const Index elements = round_up(packed_size, 16) + bias_size + slots * (panel + result);
    const Workspace workspace(context_, static_cast<std::size_t>(elements) * sizeof(T), "matmul");
    T* packed = static_cast<T*>(workspace.data());
    T* bias = nullptr;
    T* scratch = packed + round_up(packed_size, 16);
    if (bias_ != nullptr) {
      bias = scratch;
      scratch += bias_size;
      for (Index j = 0; j < bias_size; ++j)
        bias[j] = j < n_ ? static_cast<T>(load(bias_ + j)) : T(0);
    }

    const Index pieces = (slab.rows + kPackRows - 1) / kPackRows;
    const Index chunks = (slab.depth + kDepth - 1) / kDepth;
    pool.parallel_for(pieces * chunks, 1, [&](Index begin, Index end) {
      for (Index i = begin; i < end; ++i)
        pack_piece(packed, slab, i % pieces * kPackRows, i / pieces * kDepth);
    });
    pool.parallel_for(slots, 1, [&](Index begin, Index end) {
      for (Index slot = begin; slot < end; ++slot)
        for (Index i = slot * blocks / slots; i < (slot + 1) * blocks / slots; ++i) {
          T* own = scratch + slot * (panel + result);
          const Index row = i % grid.row_blocks * grid.rows;
          const Index column = i / grid.row_blocks * grid.columns;
          const Block block{row, std::min(grid.rows, slab.rows - row), column,
                            std::min(grid.columns, n_ - column)};
          multiply_block(slab, block, packed, bias, own, own + panel);
        }
    });
  }

  /// In packed a all rows of a slab lie together for each chunk of the depth.
  static const T* packed_rows(const T* packed, const Slab& slab, Index row, Index k) {
    const Index chunk = std::min(kDepth, slab.depth - k);
    return packed + round_up(slab.rows, kTileRows) * k + row * chunk;
  }

  void pack_piece(T* packed, const Slab& slab, Index row, Index k) {
    T* to = packed + (packed_rows(packed, slab, row, k) - packed);
    pack_a(to, a_.at(slab.row + row, slab.k + k), a_.stride, a_.transposed,
           std::min(kPackRows, slab.rows - row), std::min(kDepth, slab.depth - k));
  }

  void multiply_block(const Slab& slab, const Block& block, const T* packed, const T* bias,
                      T* panel, T* result) {
    C* c = c_ + (slab.row + block.row) * c_stride_ + block.column;
    T* sums = result;
    Index stride = block.columns;
    if constexpr (!kConvertsC) {
      sums = c;
      stride = c_stride_;
    }
    Index k = 0;
    do {
      const Index depth = std::min(kDepth, slab.depth - k);
      const bool first = slab.k + k == 0;
      const TileStart<T> start{first ? accumulate_ && !kConvertsC : true,
                               first && bias != nullptr ? bias + block.column : nullptr};
      pack_b(panel, b_.at(slab.k + k, block.column), b_.stride, b_.transposed, block.columns,
             depth);
      for (Index i = 0; i < block.rows; i += kCachedRows)
        multiply_panels(std::min(kCachedRows, block.rows - i), block.columns, depth,
                        packed_rows(packed, slab, block.row + i, k), panel, sums + i * stride,
                        stride, start);
      k += depth;
    } while (k < slab.depth);
    if constexpr (kConvertsC) {
      for (Index i = 0; i < block.rows; ++i) {
        const T* from = sums + i * stride;
        C* to = c + i * c_stride_;
        const bool accumulate = accumulate_;
#pragma omp simd
        for (Index j = 0; j < block.columns; ++j)
          store(to + j, accumulate ? from[j] + load(to + j) : from[j]);
      }
    }
  }

  Context& context_;
  Operand<E> a_, b_;
  C* c_;
  Index c_stride_;
  const E* bias_;
  bool accumulate_;
  Index m_, n_, k_;
};

}  // namespace

void matmul(Context& context, const Matmul& args) {
  if (args.a.dtype == DType::F64)
    Product<double, double, double>(context, args).run();
  else if (args.a.dtype == DType::F32)
    Product<float, float, float>(context, args).run();
  else if (args.c.dtype == DType::F32)
    Product<BFloat16, float, float>(context, args).run();
  else
    Product<BFloat16, float, BFloat16>(context, args).run();
}

TESSERA_CPU_END
