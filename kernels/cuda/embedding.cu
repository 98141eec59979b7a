#include <limits>
#include <type_traits>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/token_sort.h"
#include "kernels/embedding.h"
#include "kernels/workspace.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kPiece = EmbeddingShape::kPiece;

struct WarpPlace {
  std::int64_t row;
  int lane;
  __device__ __forceinline__ WarpPlace()
      : row(static_cast<std::int64_t>(blockIdx.x) * EmbeddingShape::kWarps +
            threadIdx.x / kWarpSize),
        lane(static_cast<int>(threadIdx.x) % kWarpSize) {}
  /// First column of this lane in kernels that give a warp 32 packs of columns.
  template <int N>
  __device__ __forceinline__ std::int64_t column() const {
    return (static_cast<std::int64_t>(blockIdx.y) * kWarpSize + lane) * N;
  }
};

template <typename T>
struct Forward {
  const std::int32_t* tokens;
  const T* token_weight;
  const T* position_weight;
  T* y;
  std::int64_t rows, columns, width, vocab_size, first_position;
};

// A warp per row. Bound by memory: reads one or two rows, writes one.
template <typename T, int N, bool kPositions>
__global__ void __launch_bounds__(EmbeddingShape::kThreads) forward_kernel(Forward<T> args) {
  const WarpPlace at;
  if (at.row >= args.rows) return;
  const std::int64_t width = args.width;
  const std::int64_t token = args.tokens[at.row];
  T* out = args.y + at.row * width;
  if (token < 0 || token >= args.vocab_size) {
    for (std::int64_t c = at.lane; c < width; c += kWarpSize)
      out[c] = narrow<T>(std::numeric_limits<Compute<T>>::quiet_NaN());
    return;
  }
  const T* from = args.token_weight + token * width;
  const T* position = nullptr;
  if constexpr (kPositions)
    position = args.position_weight + (args.first_position + at.row % args.columns) * width;
  for (std::int64_t c = at.lane * N; c < width; c += kWarpSize * N) {
    Pack<T, N> pack = load_pack<N>(from + c);
    if constexpr (kPositions) {
      const Pack<T, N> addend = load_pack<N>(position + c);
      for (int k = 0; k < N; ++k) pack[k] = narrow<T>(widen(pack[k]) + widen(addend[k]));
    }
    store_pack<N>(out + c, pack);
  }
}

/// A thread's sum of gradient rows, over N adjacent columns.
template <typename T, int N>
struct RowSum {
  using A = Compute<T>;
  static constexpr int kPart = N < kPack<A> ? N : kPack<A>;
  A values[N] = {};

  /// Adds the rows that start at column + row_of(i) * width, for i in [begin, end), in order, with
  /// four loads in flight.
  template <typename U, typename RowOf>
  __device__ __forceinline__ void add_rows(const U* column, std::int64_t width, int begin, int end,
                                           RowOf row_of) {
    constexpr int kTogether = 4;
    int i = begin;
    for (; i + kTogether <= end; i += kTogether) {
      RowPart<U> parts[kTogether];
      for (int j = 0; j < kTogether; ++j) parts[j].load(column + row_of(i + j) * width);
      for (int j = 0; j < kTogether; ++j) add(parts[j]);
    }
    for (; i < end; ++i) {
      RowPart<U> part;
      part.load(column + row_of(i) * width);
      add(part);
    }
  }

  __device__ __forceinline__ void store(A* to, bool accumulate) const {
    for (int k = 0; k < N; k += kPart) {
      Pack<A, kPart> part{};
      if (accumulate) part = load_pack<kPart>(to + k);
      for (int j = 0; j < kPart; ++j) part[j] += values[k + j];
      store_pack<kPart>(to + k, part);
    }
  }

 private:
  template <typename U>
  struct RowPart {
    static constexpr int kSize = N < kPack<U> ? N : kPack<U>;
    Pack<U, kSize> packs[N / kSize];
    __device__ __forceinline__ void load(const U* from) {
      for (int p = 0; p < N / kSize; ++p) packs[p] = load_pack<kSize>(from + p * kSize);
    }
  };
  template <typename U>
  __device__ __forceinline__ void add(const RowPart<U>& part) {
    constexpr int kSize = RowPart<U>::kSize;
    for (int k = 0; k < N; ++k) values[k] += widen(part.packs[k / kSize][k % kSize]);
  }
};

// starts[v] = number of sorted tokens below v, for v in [0, vocab_size].
struct StartsBody {
  const TokenPlace* places;
  int count;
  int* starts;
  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t v, std::integral_constant<int, N>) const {
    int low = 0, high = count;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (places[middle].token < v)
        low = middle + 1;
      else
        high = middle;
    }
    starts[v] = low;
  }
};

struct PlaceOf {
  const TokenPlace* places;
  __device__ __forceinline__ std::int64_t operator()(int i) const { return places[i].place; }
};
struct Itself {
  __device__ __forceinline__ std::int64_t operator()(int i) const { return i; }
};

template <typename T>
struct TokenGradient {
  const TokenPlace* places;
  const T* grad_y;
  Compute<T>* partials;  // [pieces, width]
  const int* starts;
  Compute<T>* grad;
  std::int64_t width, pieces, vocab_size;
  std::int64_t count, rows;  // tokens of the batch; rows of grad
  std::int32_t* ids;         // null: a row is a token; else the first place of a token, or unused
  bool accumulate;
};

// A piece is kPiece consecutive sorted tokens. If all are the same token, a warp sums their rows of
// grad_y, for 32 packs of columns.
template <typename T, int N>
__global__ void __launch_bounds__(EmbeddingShape::kThreads) piece_kernel(TokenGradient<T> args) {
  const WarpPlace at;
  const std::int64_t column = at.column<N>();
  if (at.row >= args.pieces || column >= args.width) return;
  const int begin = static_cast<int>(at.row) * kPiece, end = begin + kPiece;
  const std::int32_t token = args.places[begin].token;
  if (token != args.places[end - 1].token || token == args.vocab_size) return;
  RowSum<T, N> sum;
  sum.add_rows(args.grad_y + column, args.width, begin, end, PlaceOf{args.places});
  sum.store(args.partials + at.row * args.width + column, false);
}

// A warp per row of the gradient and 32 packs of columns. It adds the rows of grad_y up to the
// token's first whole piece, then the sums of whole pieces, then the remaining rows. Memory-bound:
// reads grad_y once, writes the gradient once. For n tokens in the batch, the longest chain of
// additions is 2 * 127 + n / 128.
//
// The kernels before it are bound by latency: two per 8 bits of the vocabulary size for sorting,
// one for `starts`, one for the pieces. Scratch memory: 16 bytes per token of the batch, 4 per
// token of the vocabulary, a row per 128 tokens of the batch.
template <typename T, int N>
__global__ void __launch_bounds__(EmbeddingShape::kThreads)
    token_gradient_kernel(TokenGradient<T> args) {
  const WarpPlace at;
  const std::int64_t column = at.column<N>(), width = args.width;
  if (at.row >= args.rows || column >= width) return;
  std::int64_t token = at.row;
  if (args.ids != nullptr) {
    token = at.row < args.count ? args.places[at.row].token : args.vocab_size;
    const bool is_first = token < args.vocab_size && args.starts[token] == at.row;
    if (column == 0) args.ids[at.row] = is_first ? static_cast<std::int32_t>(token) : -1;
    if (!is_first) return;
  }
  const int begin = args.starts[token], end = args.starts[token + 1];
  if (begin == end && args.accumulate) return;
  const int first_piece = (begin + kPiece - 1) / kPiece, last_piece = end / kPiece;
  const bool whole = first_piece < last_piece;
  const T* in = args.grad_y + column;
  const PlaceOf place_of{args.places};
  RowSum<T, N> sum;
  sum.add_rows(in, width, begin, whole ? first_piece * kPiece : end, place_of);
  if (whole) {
    sum.add_rows(args.partials + column, width, first_piece, last_piece, Itself{});
    sum.add_rows(in, width, last_piece * kPiece, end, place_of);
  }
  sum.store(args.grad + at.row * width + column, args.accumulate);
}

template <typename T>
struct PositionGradient {
  const T* grad_y;
  Compute<T>* grad;
  int rows;
  std::int64_t columns, width, positions, first_position;
  bool accumulate;
};

struct SameColumn {
  std::int64_t column, columns;
  __device__ __forceinline__ std::int64_t operator()(int row) const {
    return row * columns + column;
  }
};

// A warp per position and 32 packs of columns. Memory-bound: reads grad_y once. With few positions,
// bound by the latency of the rows that a warp reads.
template <typename T, int N>
__global__ void __launch_bounds__(EmbeddingShape::kThreads)
    position_gradient_kernel(PositionGradient<T> args) {
  const WarpPlace at;
  const std::int64_t column = at.column<N>(), width = args.width;
  if (at.row >= args.positions || column >= width) return;
  const std::int64_t t = at.row - args.first_position;
  const bool present = t >= 0 && t < args.columns;
  if (!present && args.accumulate) return;
  RowSum<T, N> sum;
  if (present) sum.add_rows(args.grad_y + column, width, 0, args.rows, SameColumn{t, args.columns});
  sum.store(args.grad + at.row * width + column, args.accumulate);
}

/// A warp for each row and 32 packs of its columns.
LaunchShape sums_of_rows(std::int64_t rows, std::int64_t width, int pack) {
  return {.grid = EmbeddingShape::blocks(rows),
          .block = EmbeddingShape::kThreads,
          .grid_y = EmbeddingShape::slabs(width, pack)};
}

// @param ids  null: a row of `to` is a token, from first_token on
template <typename T>
void token_gradient(Context& context, const TensorView& tokens, const TensorView& grad_y,
                    std::int64_t vocab_size, std::int64_t first_token, const GradientView& to,
                    std::int32_t* ids) {
  using A = Compute<T>;
  const std::int64_t count = tokens.numel();
  const std::int64_t rows = to.view.shape[0], width = grad_y.shape[2];
  if (vocab_size == 0) return;
  const std::int64_t pieces = count / kPiece;

  static_assert(sizeof(TokenPlace) == TokenGradientScratch::kPlaceBytes);
  const TokenGradientScratch at(count, vocab_size, width, sizeof(A));
  const Workspace workspace(context, static_cast<std::size_t>(at.bytes),
                            ids == nullptr ? "embedding_backward" : "embedding_backward_rows");
  auto* memory = static_cast<std::byte*>(workspace.data());

  const TokenPlace* places = sort_tokens(
      context, static_cast<const std::int32_t*>(tokens.data), first_token, static_cast<int>(count),
      static_cast<int>(vocab_size), reinterpret_cast<TokenPlace*>(memory + at.a),
      reinterpret_cast<TokenPlace*>(memory + at.b), reinterpret_cast<int*>(memory + at.counts));
  auto* const first_places = reinterpret_cast<int*>(memory + at.starts);
  launch_elementwise<1>(context, "embedding_backward: starts", vocab_size + 1, true,
                        StartsBody{places, static_cast<int>(count), first_places});
  const TokenGradient<T> gradient{.places = places,
                                  .grad_y = static_cast<const T*>(grad_y.data),
                                  .partials = reinterpret_cast<A*>(memory + at.partials),
                                  .starts = first_places,
                                  .grad = static_cast<A*>(to.view.data),
                                  .width = width,
                                  .pieces = pieces,
                                  .vocab_size = vocab_size,
                                  .count = count,
                                  .rows = rows,
                                  .ids = ids,
                                  .accumulate = to.accumulate};
  visit_pack<T>(width % kPack<T> == 0 && is_aligned(gradient.grad_y, gradient.grad),
                [&]<int N>(std::integral_constant<int, N>) {
                  if (pieces > 0)
                    launch(context, "embedding_backward: pieces", piece_kernel<T, N>,
                           sums_of_rows(pieces, width, N), gradient);
                  launch(context, "embedding_backward: tokens", token_gradient_kernel<T, N>,
                         sums_of_rows(rows, width, N), gradient);
                });
}

template <typename T>
void position_gradient(Context& context, const EmbeddingBackward& args) {
  const TensorView& grad = args.grad_position_weight.view;
  if (grad.numel() == 0) return;
  const PositionGradient<T> gradient{.grad_y = static_cast<const T*>(args.grad_y.data),
                                     .grad = static_cast<Compute<T>*>(grad.data),
                                     .rows = static_cast<int>(args.tokens.shape[0]),
                                     .columns = args.tokens.shape[1],
                                     .width = grad.shape[1],
                                     .positions = grad.shape[0],
                                     .first_position = args.first_position,
                                     .accumulate = args.grad_position_weight.accumulate};
  visit_pack<T>(gradient.width % kPack<T> == 0 && is_aligned(gradient.grad_y, gradient.grad),
                [&]<int N>(std::integral_constant<int, N>) {
                  launch(context, "embedding_backward: positions", position_gradient_kernel<T, N>,
                         sums_of_rows(gradient.positions, gradient.width, N), gradient);
                });
}

void check_sizes(std::int64_t count, std::int64_t vocab_size) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // positions and tokens are sorted as ints
  require<Unsupported>(count <= kMost && vocab_size <= kMost,
                       "embedding_backward: {} tokens and a vocabulary of {}; the limit is {}",
                       count, vocab_size, kMost);
}

}  // namespace

void embedding_forward(Context& context, const EmbeddingForward& args) {
  if (args.y.numel() == 0) return;
  visit_floating(args.y.dtype, "embedding_forward", [&]<typename T>(std::type_identity<T>) {
    const Forward<T> forward{.tokens = static_cast<const std::int32_t*>(args.tokens.data),
                             .token_weight = static_cast<const T*>(args.token_weight.data),
                             .position_weight = static_cast<const T*>(args.position_weight.data),
                             .y = static_cast<T*>(args.y.data),
                             .rows = args.tokens.numel(),
                             .columns = args.tokens.shape[1],
                             .width = args.y.shape[2],
                             .vocab_size = args.token_weight.shape[0],
                             .first_position = args.first_position};
    const bool packs = forward.width % kPack<T> == 0 &&
                       is_aligned(forward.token_weight, forward.position_weight, forward.y);
    visit_pack<T>(packs, [&]<int N>(std::integral_constant<int, N>) {
      launch(
          context, "embedding_forward",
          args.position_weight.defined() ? forward_kernel<T, N, true> : forward_kernel<T, N, false>,
          LaunchShape{EmbeddingShape::blocks(forward.rows), EmbeddingShape::kThreads}, forward);
    });
  });
}

void embedding_backward(Context& context, const EmbeddingBackward& args) {
  const std::int64_t vocab_size = args.grad_token_weight ? args.grad_token_weight.view.shape[0] : 0;
  check_sizes(args.tokens.numel(), vocab_size);
  if (args.grad_y.shape[2] == 0) return;
  visit_floating(args.grad_y.dtype, "embedding_backward", [&]<typename T>(std::type_identity<T>) {
    if (args.grad_token_weight)
      token_gradient<T>(context, args.tokens, args.grad_y, vocab_size, args.first_token,
                        args.grad_token_weight, nullptr);
    if (args.grad_position_weight) position_gradient<T>(context, args);
  });
}

void embedding_backward_rows(Context& context, const EmbeddingBackwardRows& args) {
  check_sizes(args.tokens.numel(), args.vocab_size);
  visit_floating(args.grad_y.dtype, "embedding_backward", [&]<typename T>(std::type_identity<T>) {
    token_gradient<T>(context, args.tokens, args.grad_y, args.vocab_size, 0,
                      {args.rows, false, true}, static_cast<std::int32_t*>(args.ids.data));
  });
}

TESSERA_CUDA_KERNEL(embedding_forward, EmbeddingForward)
TESSERA_CUDA_KERNEL(embedding_backward, EmbeddingBackward)
TESSERA_CUDA_KERNEL(embedding_backward_rows, EmbeddingBackwardRows)

}  // namespace tessera::kernels::cuda
