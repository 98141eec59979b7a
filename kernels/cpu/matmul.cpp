#include "kernels/matmul.h"

#include <Eigen/Core>
#include <algorithm>

#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"
#include "kernels/workspace.h"

// c is cut into blocks of columns (and rows, where there are too few columns) that threads compute
// on their own. All of a (at most kMaxPacked elements at a time) is packed once into the order in
// which Eigen's inner kernel reads it and shared by the threads; each thread packs its blocks of b.
// Eigen sees c column by column, so that its vectors run along the rows of a row-major c: what it
// calls lhs is b, what it calls rhs is a.
//
// An element of c is a sum over k in blocks of kDepth whose order does not depend on the number of
// threads. Eigen's outer loops are not used: they would clear c in a pass of its own, pack a once
// per thread, and allocate outside the memory ledger.
// Blocking after Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication".
TESSERA_CPU_BEGIN
namespace {

using Index = std::int64_t;

constexpr Index kDepth = 256;          // of a packed panel of b, which must fit the L1 cache
constexpr Index kColumns = 384;        // of c per block: kDepth x kColumns fit the L2 cache
constexpr Index kMaxPacked = 8 << 20;  // elements of a that are packed at a time
constexpr Index kPackRows = 64;        // of a, packed by one call

template <typename T>
struct Inner {
  template <int order>
  using Mapper = Eigen::internal::const_blas_data_mapper<T, Index, order>;
  using Traits = Eigen::internal::gebp_traits<T, T>;
  using Result = Eigen::internal::blas_data_mapper<T, Index, Eigen::ColMajor, Eigen::Unaligned, 1>;
  static constexpr Index kRowStep = Traits::nr;
  static constexpr Index kColumnStep = Traits::mr;

  template <int order>
  using PackB =
      Eigen::internal::gemm_pack_lhs<T, Index, Mapper<order>, Traits::mr, Traits::LhsProgress,
                                     typename Traits::LhsPacket4Packing, order>;
  template <int order>
  using PackA = Eigen::internal::gemm_pack_rhs<T, Index, Mapper<order>, Traits::nr, order>;
  using Kernel =
      Eigen::internal::gebp_kernel<T, T, Index, Result, Traits::mr, Traits::nr, false, false>;

  /// rows x depth of op(a), whose first element is at data
  static void pack_a(T* packed, const T* data, Index stride, bool transposed, Index depth,
                     Index rows) {
    if (transposed)
      PackA<Eigen::RowMajor>()(packed, Mapper<Eigen::RowMajor>(data, stride), depth, rows);
    else
      PackA<Eigen::ColMajor>()(packed, Mapper<Eigen::ColMajor>(data, stride), depth, rows);
  }
  /// depth x columns of op(b), whose first element is at data
  static void pack_b(T* packed, const T* data, Index stride, bool transposed, Index depth,
                     Index columns) {
    if (transposed)
      PackB<Eigen::RowMajor>()(packed, Mapper<Eigen::RowMajor>(data, stride), depth, columns);
    else
      PackB<Eigen::ColMajor>()(packed, Mapper<Eigen::ColMajor>(data, stride), depth, columns);
  }
  static void multiply(T* c, Index stride, const T* packed_b, const T* packed_a, Index columns,
                       Index depth, Index rows) {
    Kernel()(Result(c, stride), packed_b, packed_a, columns, depth, rows, T(1));
  }
};

/// A row-major matrix, or its transpose: element (i, j) is data[j * stride + i] if transposed.
template <typename E>
struct Operand {
  const E* data;
  Index stride;
  bool transposed;
  const E* at(Index row, Index column) const {
    return transposed ? data + column * stride + row : data + row * stride + column;
  }
};

/// A rows x columns window of an operand in the type of the sums: the operand itself, or a copy.
template <typename E, typename T>
Operand<T> window(const Operand<E>& operand, Index row, Index column, Index rows, Index columns,
                  T* copy) {
  const E* first = operand.at(row, column);
  if constexpr (std::is_same_v<E, T>) {
    return {first, operand.stride, operand.transposed};
  } else {
    const Index lines = operand.transposed ? columns : rows;
    const Index length = operand.transposed ? rows : columns;
    for (Index i = 0; i < lines; ++i) {
      const E* from = first + i * operand.stride;
      T* to = copy + i * length;
#pragma omp simd
      for (Index j = 0; j < length; ++j) to[j] = load(from + j);
    }
    return {copy, length, operand.transposed};
  }
}

/// What a block of c holds before the products are added: c itself, the bias, or zero.
template <typename T, typename C, typename E>
void start_block(T* block, Index block_stride, const C* c, Index c_stride, const E* bias,
                 bool accumulate, Index rows, Index columns) {
  for (Index i = 0; i < rows; ++i) {
    T* to = block + i * block_stride;
    const C* from = c + i * c_stride;
#pragma omp simd
    for (Index j = 0; j < columns; ++j) {
      T value = bias != nullptr ? static_cast<T>(load(bias + j)) : T(0);
      if (accumulate) value += static_cast<T>(load(from + j));
      to[j] = value;
    }
  }
}

/// How c is cut into blocks: every thread gets at least one where c is large enough.
struct Grid {
  Index rows, columns;  // of c in a block
  Index row_blocks, column_blocks;
};

template <typename T>
Grid make_grid(Index m, Index n, Index threads) {
  constexpr Index kRowStep = Inner<T>::kRowStep;
  constexpr Index kColumnStep = Inner<T>::kColumnStep;
  Grid grid{m, round_up(n, kColumnStep), 1, 1};
  if (n >= 2 * kColumnStep * threads) {
    const Index blocks = round_up((n + kColumns - 1) / kColumns, threads);
    grid.columns = round_up((n + blocks - 1) / blocks, kColumnStep);
    grid.column_blocks = (n + grid.columns - 1) / grid.columns;
  } else {
    grid.columns = std::min(grid.columns, kColumns);
    grid.column_blocks = (n + grid.columns - 1) / grid.columns;
    grid.rows = round_up((m + threads - 1) / threads, kRowStep);
    grid.row_blocks = (m + grid.rows - 1) / grid.rows;
  }
  return grid;
}

template <typename T, typename E, typename C>
class Product {
 public:
  Product(Context& context, const Matmul& args)
      : pool_(context.threads()),
        context_(context),
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
    const Index max_depth = kConvertsC ? std::max<Index>(k_, 1) : std::min<Index>(k_, 16 * kDepth);
    const Index max_rows = std::clamp<Index>(
        kMaxPacked / std::max<Index>(max_depth, 1) / kPackRows * kPackRows, kPackRows, 4096);
    for (Index row = 0; row < m_; row += max_rows) {
      const Index rows = std::min(max_rows, m_ - row);
      Index k = 0;
      do {
        const Index depth = std::min(max_depth, k_ - k);
        run_slab(row, rows, k, depth);
        k += depth;
      } while (k < k_);
    }
  }

 private:
  static constexpr bool kConvertsIn = !std::is_same_v<E, T>;
  static constexpr bool kConvertsC = !std::is_same_v<C, T>;

  /// Rows [row, row + rows) of c, terms [k, k + depth) of the sums.
  void run_slab(Index row, Index rows, Index k, Index depth) {
    const Index threads = pool_.size();
    const Grid grid = make_grid<T>(rows, n_, threads);
    const Index blocks = grid.row_blocks * grid.column_blocks;
    const Index slots = std::min(threads, blocks);
    const Index chunk = std::min(depth, kDepth);
    const Index panel = round_up(grid.columns * chunk, 16);
    const Index copy = kConvertsIn ? round_up(std::max(grid.columns, kPackRows) * chunk, 16) : 0;
    const Index result = kConvertsC ? round_up(grid.rows * grid.columns, 16) : 0;
    const Index per_slot = panel + copy + result;
    const Index packed_size = round_up(rows * depth, 16);
    const Index copies = std::max(slots * per_slot, threads * copy);
    const Workspace workspace(context_, static_cast<std::size_t>(packed_size + copies) * sizeof(T),
                              "matmul");
    T* packed = static_cast<T*>(workspace.data());
    T* scratch = packed + packed_size;

    const Index pieces = (rows + kPackRows - 1) / kPackRows;
    const Index pack_slots = std::min(threads, pieces);
    pool_.parallel_for(pack_slots, 1, [&](Index begin, Index end) {
      for (Index slot = begin; slot < end; ++slot)
        for (Index piece = slot * pieces / pack_slots; piece < (slot + 1) * pieces / pack_slots;
             ++piece)
          pack_rows(packed, row, rows, piece, k, depth, scratch + slot * copy);
    });
    pool_.parallel_for(slots, 1, [&](Index begin, Index end) {
      for (Index slot = begin; slot < end; ++slot)
        for (Index block = slot * blocks / slots; block < (slot + 1) * blocks / slots; ++block) {
          T* own = scratch + slot * per_slot;
          const Index first_row = block % grid.row_blocks * grid.rows;
          const Index first_column = block / grid.row_blocks * grid.columns;
          multiply_block({first_row, std::min(grid.rows, rows - first_row), first_column,
                          std::min(grid.columns, n_ - first_column)},
                         row, rows, k, depth, packed, own, own + panel, own + panel + copy);
        }
    });
  }

  /// Packs kPackRows rows of a: for each chunk of the depth all rows lie together.
  void pack_rows(T* packed, Index row, Index rows, Index piece, Index k, Index depth, T* copy) {
    const Index first = piece * kPackRows;
    const Index count = std::min(kPackRows, rows - first);
    for (Index d = 0; d < depth; d += kDepth) {
      const Index chunk = std::min(kDepth, depth - d);
      const auto a = window(a_, row + first, k + d, count, chunk, copy);
      Inner<T>::pack_a(packed + d * rows + first * chunk, a.data, a.stride, a.transposed, chunk,
                       count);
    }
  }

  struct Block {
    Index row, rows, column, columns;
  };
  void multiply_block(const Block& block, Index row, Index rows, Index k, Index depth,
                      const T* packed, T* panel, T* copy, T* result) {
    C* c = c_ + (row + block.row) * c_stride_ + block.column;
    T* sums = result;
    Index stride = block.columns;
    if constexpr (!kConvertsC) {
      sums = c;
      stride = c_stride_;
    }
    if (k == 0 && !(accumulate_ && bias_ == nullptr && !kConvertsC))
      start_block(sums, stride, c, c_stride_, bias_ == nullptr ? nullptr : bias_ + block.column,
                  accumulate_, block.rows, block.columns);
    for (Index d = 0; d < depth; d += kDepth) {
      const Index chunk = std::min(kDepth, depth - d);
      const auto b = window(b_, k + d, block.column, chunk, block.columns, copy);
      Inner<T>::pack_b(panel, b.data, b.stride, b.transposed, chunk, block.columns);
      Inner<T>::multiply(sums, stride, panel, packed + d * rows + block.row * chunk, block.columns,
                         chunk, block.rows);
    }
    if constexpr (kConvertsC) {
      for (Index i = 0; i < block.rows; ++i) {
        const T* from = sums + i * stride;
        C* to = c + i * c_stride_;
#pragma omp simd
        for (Index j = 0; j < block.columns; ++j) store(to + j, from[j]);
      }
    }
  }

  ThreadPool& pool_;
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
    Product<float, BFloat16, float>(context, args).run();
  else
    Product<float, BFloat16, BFloat16>(context, args).run();
}

TESSERA_CPU_END
