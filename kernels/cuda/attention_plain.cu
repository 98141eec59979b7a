#include <cmath>

#include "kernels/cuda/attention_plain_tiles.h"

// Attention of f32 and f64 on CUDA cores, organized as on tensor cores (see
// attention_bf16_backward.cu for the equations). Bound by shared memory: with 2 rows and 2 columns
// per thread, a matrix product reads 4 packs per 4 multiplications of packs.
namespace tessera::kernels::cuda {
namespace {

template <typename T, int kDim>
__global__ void __launch_bounds__(Plain<T, kDim>::kThreads, Plain<T, kDim>::kBlocks)
    attention_forward_plain_kernel(const AttentionForwardArgs<T> args, int tiles) {
  using P = Plain<T, kDim>;
  constexpr int kRows = P::kRows;
  const P plain;
  const AttentionSizes& sizes = args.sizes;
  const AttentionPlace place(tiles, sizes.heads, true);
  const int first = place.tile * kRows, kv_head = place.head / sizes.group();
  const int count = std::min(kRows, sizes.queries - first);
  SharedMemory memory;
  const auto q = memory.take<T>(P::kTile), k = memory.take<T>(P::kTile);
  const auto v = memory.take<T>(P::kTile), weights = memory.take<T>(P::kScores);

  typename P::Sums sums = {};
  T maxima[P::kPer], totals[P::kPer] = {};
  TESSERA_UNROLL
  for (int i = 0; i < P::kPer; ++i) maxima[i] = std::numeric_limits<T>::lowest();

  plain.load(q, args.q, place.batch, first, place.head, count, sizes.dim);
  const int seen = first + count + sizes.past();
  for (int key = 0; key < seen; key += kRows) {
    const int rows = std::min(kRows, sizes.keys - key);
    __syncthreads();  // the previous tiles have been read
    plain.load(k, args.k, place.batch, key, kv_head, rows, sizes.dim);
    plain.load(v, args.v, place.batch, key, kv_head, rows, sizes.dim);
    __syncthreads();
    typename P::Scores scores;
    plain.product_of_rows(scores, q, k, args.scale);
    TESSERA_UNROLL
    for (int i = 0; i < P::kPer; ++i) {
      const int visible = first + plain.y + i * P::kSide + sizes.past() - key;
      T highest = maxima[i];
      TESSERA_UNROLL
      for (int j = 0; j < P::kPer; ++j) {
        if (plain.x + j * P::kSide > visible) scores[i][j] = -std::numeric_limits<T>::infinity();
        highest = scores[i][j] > highest ? scores[i][j] : highest;
      }
      for (int lanes = P::kSide / 2; lanes > 0; lanes /= 2) {
        const T other = __shfl_xor_sync(kAllLanes, highest, lanes);
        highest = other > highest ? other : highest;
      }
      const T factor = std::exp(maxima[i] - highest);
      maxima[i] = highest;
      totals[i] *= factor;
      TESSERA_UNROLL
      for (int j = 0; j < P::kPer; ++j) {
        scores[i][j] = std::exp(scores[i][j] - highest);
        totals[i] += scores[i][j];
      }
      TESSERA_UNROLL
      for (int c = 0; c < P::kGroups * P::kWide; ++c) sums[i][c] *= factor;
    }
    plain.put(weights, scores);
    __syncwarp(kAllLanes);  // a row of weights is read by the warp that wrote it
    plain.template add_weighted_rows<false>(sums, weights, v);
  }
  TESSERA_UNROLL
  for (int i = 0; i < P::kPer; ++i) {
    T total = totals[i];
    for (int lanes = P::kSide / 2; lanes > 0; lanes /= 2)
      total += __shfl_xor_sync(kAllLanes, total, lanes);
    TESSERA_UNROLL
    for (int c = 0; c < P::kGroups * P::kWide; ++c) sums[i][c] /= total;
    const int row = plain.y + i * P::kSide;
    if (args.log_sum_exp != nullptr && plain.x == 0 && row < count) {
      const std::int64_t head = std::int64_t{place.batch} * sizes.heads + place.head;
      args.log_sum_exp[head * sizes.queries + first + row] = maxima[i] + std::log(total);
    }
  }
  plain.store(sums, T(1), args.out, place.batch, first, place.head, count, sizes.dim, false);
}

template <typename T, int kDim>
struct PlainScores {
  using P = Plain<T, kDim>;
  const P& plain;
  const AttentionBackwardArgs<T>& args;
  int batch, head, query, key;

  /// Computes P and dS of a tile, queries by keys. Both are 0 beyond the last query.
  __device__ __forceinline__ void make(const SharedArray<T>& q, const SharedArray<T>& k,
                                       const SharedArray<T>& v, const SharedArray<T>& grad_out,
                                       typename P::Scores& weights,
                                       typename P::Scores& grad_scores) const {
    const AttentionSizes& sizes = args.sizes;
    plain.product_of_rows(weights, q, k, args.scale);
    plain.product_of_rows(grad_scores, grad_out, v, T(1));
    TESSERA_UNROLL
    for (int i = 0; i < P::kPer; ++i) {
      const int row = query + plain.y + i * P::kSide;
      const bool inside = row < sizes.queries;
      const std::int64_t at =
          (std::int64_t{batch} * sizes.heads + head) * sizes.queries + (inside ? row : 0);
      const T shift = args.log_sum_exp[at], delta = args.delta[at];
      TESSERA_UNROLL
      for (int j = 0; j < P::kPer; ++j) {
        const bool visible = inside && key + plain.x + j * P::kSide <= row + sizes.past();
        weights[i][j] = visible ? std::exp(weights[i][j] - shift) : T(0);
        grad_scores[i][j] = weights[i][j] * (grad_scores[i][j] - delta);
      }
    }
  }
};

template <typename T, int kDim>
__global__ void __launch_bounds__(Plain<T, kDim>::kThreads, Plain<T, kDim>::kBlocks)
    attention_key_gradient_plain_kernel(const AttentionBackwardArgs<T> args, int tiles) {
  using P = Plain<T, kDim>;
  constexpr int kRows = P::kRows;
  const P plain;
  const AttentionSizes& sizes = args.sizes;
  const AttentionPlace place(tiles, sizes.kv_heads, false);
  const int first = place.tile * kRows, count = std::min(kRows, sizes.keys - first);
  SharedMemory memory;
  const auto k = memory.take<T>(P::kTile), v = memory.take<T>(P::kTile);
  const auto q = memory.take<T>(P::kTile), grad_out = memory.take<T>(P::kTile);
  const auto weights = memory.take<T>(P::kScores), grad_scores = memory.take<T>(P::kScores);

  typename P::Sums grad_k = {}, grad_v = {};
  plain.load(k, args.k, place.batch, first, place.head, count, sizes.dim);
  plain.load(v, args.v, place.batch, first, place.head, count, sizes.dim);
  const int first_query = std::max(0, first - sizes.past()) / kRows * kRows;
  for (int in_group = 0; in_group < sizes.group(); ++in_group) {
    const int head = place.head * sizes.group() + in_group;
    for (int query = first_query; query < sizes.queries; query += kRows) {
      const int rows = std::min(kRows, sizes.queries - query);
      __syncthreads();
      plain.load(q, args.q, place.batch, query, head, rows, sizes.dim);
      plain.load(grad_out, args.grad_out, place.batch, query, head, rows, sizes.dim);
      __syncthreads();
      typename P::Scores p, grad_p;
      PlainScores<T, kDim>{plain, args, place.batch, head, query, first}.make(q, k, v, grad_out, p,
                                                                              grad_p);
      plain.put(weights, p);
      plain.put(grad_scores, grad_p);
      __syncthreads();
      plain.template add_weighted_rows<true>(grad_v, weights, grad_out);
      plain.template add_weighted_rows<true>(grad_k, grad_scores, q);
    }
  }
  const auto store = [&](const GradientHeads<T>& gradient, const typename P::Sums& sums, T factor) {
    if (gradient.data != nullptr)
      plain.store(sums, factor, gradient, place.batch, first, place.head, count, sizes.dim,
                  gradient.accumulate);
  };
  store(args.grad_k, grad_k, args.scale);
  store(args.grad_v, grad_v, T(1));
}

template <typename T, int kDim>
__global__ void __launch_bounds__(Plain<T, kDim>::kThreads, Plain<T, kDim>::kBlocks)
    attention_query_gradient_plain_kernel(const AttentionBackwardArgs<T> args, int tiles) {
  using P = Plain<T, kDim>;
  constexpr int kRows = P::kRows;
  const P plain;
  const AttentionSizes& sizes = args.sizes;
  const AttentionPlace place(tiles, sizes.heads, true);
  const int first = place.tile * kRows, kv_head = place.head / sizes.group();
  const int count = std::min(kRows, sizes.queries - first);
  SharedMemory memory;
  const auto k = memory.take<T>(P::kTile), v = memory.take<T>(P::kTile);
  const auto q = memory.take<T>(P::kTile), grad_out = memory.take<T>(P::kTile);
  const auto grad_scores = memory.take<T>(P::kScores);

  typename P::Sums grad_q = {};
  plain.load(q, args.q, place.batch, first, place.head, count, sizes.dim);
  plain.load(grad_out, args.grad_out, place.batch, first, place.head, count, sizes.dim);
  const int seen = first + count + sizes.past();
  for (int key = 0; key < seen; key += kRows) {
    const int rows = std::min(kRows, sizes.keys - key);
    __syncthreads();
    plain.load(k, args.k, place.batch, key, kv_head, rows, sizes.dim);
    plain.load(v, args.v, place.batch, key, kv_head, rows, sizes.dim);
    __syncthreads();
    typename P::Scores p, grad_p;
    PlainScores<T, kDim>{plain, args, place.batch, place.head, first, key}.make(q, k, v, grad_out,
                                                                                p, grad_p);
    plain.put(grad_scores, grad_p);
    __syncwarp(kAllLanes);  // as in forward
    plain.template add_weighted_rows<false>(grad_q, grad_scores, k);
  }
  plain.store(grad_q, args.scale, args.grad_q, place.batch, first, place.head, count, sizes.dim,
              args.grad_q.accumulate);
}

}  // namespace

template <typename T>
void attention_forward_plain(Context& context, const AttentionForwardArgs<T>& args) {
  const AttentionSizes& sizes = args.sizes;
  visit_plain_head_dim<T>(sizes.dim, [&]<int kDim>(std::integral_constant<int, kDim>) {
    using P = Plain<T, kDim>;
    const int tiles = divide_up(sizes.queries, P::kRows);
    launch(context, "attention_forward", attention_forward_plain_kernel<T, kDim>,
           LaunchShape{attention_blocks("attention_forward", tiles, sizes.heads, sizes.batch),
                       P::kThreads, P::shared_bytes(3, 1)},
           args, tiles);
  });
}

template <typename T>
void attention_backward_plain(Context& context, const AttentionBackwardArgs<T>& args) {
  constexpr const char* kName = "attention_backward";
  const AttentionSizes& sizes = args.sizes;
  visit_plain_head_dim<T>(sizes.dim, [&]<int kDim>(std::integral_constant<int, kDim>) {
    using P = Plain<T, kDim>;
    if (args.grad_k.data != nullptr || args.grad_v.data != nullptr) {
      const int tiles = divide_up(sizes.keys, P::kRows);
      launch(context, "attention_backward: keys", attention_key_gradient_plain_kernel<T, kDim>,
             LaunchShape{attention_blocks(kName, tiles, sizes.kv_heads, sizes.batch), P::kThreads,
                         P::shared_bytes(4, 2)},
             args, tiles);
    }
    if (args.grad_q.data != nullptr && sizes.queries > 0) {
      const int tiles = divide_up(sizes.queries, P::kRows);
      launch(context, "attention_backward: queries", attention_query_gradient_plain_kernel<T, kDim>,
             LaunchShape{attention_blocks(kName, tiles, sizes.heads, sizes.batch), P::kThreads,
                         P::shared_bytes(4, 1)},
             args, tiles);
    }
  });
}

template void attention_forward_plain(Context&, const AttentionForwardArgs<float>&);
template void attention_forward_plain(Context&, const AttentionForwardArgs<double>&);
template void attention_backward_plain(Context&, const AttentionBackwardArgs<float>&);
template void attention_backward_plain(Context&, const AttentionBackwardArgs<double>&);

}  // namespace tessera::kernels::cuda
