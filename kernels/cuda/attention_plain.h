#pragma once

#include <cmath>

#include "kernels/cuda/attention_plain_tiles.h"
#include "kernels/cuda/attention_scores.h"

// Attention on CUDA cores, organized as on tensor cores (see attention_bf16_backward.cu for the
// equations). Bound by shared memory: with 2 rows and 2 columns per thread, a matrix product reads
// 4 packs per 4 multiplications of packs. Included by attention_plain.cu and attention_variant.cu.
namespace tessera::kernels::cuda {
namespace {

template <typename T, int kDim, typename Variant>
__global__ void __launch_bounds__(Plain<T, kDim>::kThreads, Plain<T, kDim>::kBlocks)
    attention_forward_plain_kernel(const AttentionForwardArgs<T> args, const Variant variant,
                                   int tiles) {
  using P = Plain<T, kDim>;
  using A = typename P::A;
  constexpr int kRows = P::kRows;
  const P plain;
  const AttentionSizes& sizes = args.sizes;
  const AttentionPlace place(tiles, sizes.heads, true);
  const int first = place.tile * kRows, kv_head = place.head / sizes.group();
  const int count = std::min(kRows, sizes.queries - first);
  SharedMemory memory;
  const auto q = memory.take<A>(P::kTile), k = memory.take<A>(P::kTile);
  const auto v = memory.take<A>(P::kTile), weights = memory.take<A>(P::kScores);

  typename P::Sums sums = {};
  A maxima[P::kPer], totals[P::kPer] = {};
  TESSERA_UNROLL
  for (int i = 0; i < P::kPer; ++i) maxima[i] = std::numeric_limits<A>::lowest();

  plain.load(q, args.q, place.batch, first, place.head, count, sizes.dim);
  const int seen = variant.end_key(sizes, first, count);
  for (int key = variant.first_key(sizes, first) / kRows * kRows; key < seen; key += kRows) {
    const int rows = std::min(kRows, sizes.keys - key);
    if (variant.skips(sizes, place.batch, first, count, key, rows)) continue;
    __syncthreads();  // the previous tiles have been read
    plain.load(k, args.k, place.batch, key, kv_head, rows, sizes.dim);
    plain.load(v, args.v, place.batch, key, kv_head, rows, sizes.dim);
    __syncthreads();
    typename P::Scores scores;
    plain.product_of_rows(scores, q, k, args.scale);
    TESSERA_UNROLL
    for (int i = 0; i < P::kPer; ++i) {
      const int query = first + plain.y + i * P::kSide;
      A highest = maxima[i];
      TESSERA_UNROLL
      for (int j = 0; j < P::kPer; ++j) {
        if constexpr (Variant::kCaps) scores[i][j] = variant.cap(scores[i][j]);
        if (!variant.sees(sizes, place.batch, query, key + plain.x + j * P::kSide))
          scores[i][j] = -std::numeric_limits<A>::infinity();
        highest = scores[i][j] > highest ? scores[i][j] : highest;
      }
      for (int lanes = P::kSide / 2; lanes > 0; lanes /= 2) {
        const A other = __shfl_xor_sync(kAllLanes, highest, lanes);
        highest = other > highest ? other : highest;
      }
      const A factor = std::exp(maxima[i] - highest);
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
    A total = totals[i];
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
  plain.store(sums, A(1), args.out, place.batch, first, place.head, count, sizes.dim, false);
}

template <typename T, int kDim, typename Variant>
struct PlainScores {
  using P = Plain<T, kDim>;
  using A = typename P::A;
  const P& plain;
  const AttentionBackwardArgs<T>& args;
  const Variant& variant;
  int batch, head, query, key;

  /// Computes P and dS of a tile, queries by keys. Both are 0 beyond the last query.
  __device__ __forceinline__ void make(const SharedArray<A>& q, const SharedArray<A>& k,
                                       const SharedArray<A>& v, const SharedArray<A>& grad_out,
                                       typename P::Scores& weights,
                                       typename P::Scores& grad_scores) const {
    const AttentionSizes& sizes = args.sizes;
    plain.product_of_rows(weights, q, k, args.scale);
    plain.product_of_rows(grad_scores, grad_out, v, A(1));
    TESSERA_UNROLL
    for (int i = 0; i < P::kPer; ++i) {
      const int row = query + plain.y + i * P::kSide;
      const bool inside = row < sizes.queries;
      const std::int64_t at =
          (std::int64_t{batch} * sizes.heads + head) * sizes.queries + (inside ? row : 0);
      const A shift = args.log_sum_exp[at], delta = args.delta[at];
      TESSERA_UNROLL
      for (int j = 0; j < P::kPer; ++j) {
        const bool visible =
            inside && variant.sees(sizes, batch, row, key + plain.x + j * P::kSide);
        if constexpr (Variant::kCaps) weights[i][j] = variant.cap(weights[i][j]);
        const A score = weights[i][j];
        weights[i][j] = visible ? std::exp(score - shift) : A(0);
        grad_scores[i][j] = weights[i][j] * (grad_scores[i][j] - delta);
        if constexpr (Variant::kCaps) grad_scores[i][j] *= variant.slope(score);
      }
    }
  }
};

template <typename T, int kDim, typename Variant>
__global__ void __launch_bounds__(Plain<T, kDim>::kThreads, Plain<T, kDim>::kBlocks)
    attention_key_gradient_plain_kernel(const AttentionBackwardArgs<T> args, const Variant variant,
                                        int tiles) {
  using P = Plain<T, kDim>;
  using A = typename P::A;
  constexpr int kRows = P::kRows;
  const P plain;
  const AttentionSizes& sizes = args.sizes;
  const AttentionPlace place(tiles, sizes.kv_heads, false);
  const int first = place.tile * kRows, count = std::min(kRows, sizes.keys - first);
  SharedMemory memory;
  const auto k = memory.take<A>(P::kTile), v = memory.take<A>(P::kTile);
  const auto q = memory.take<A>(P::kTile), grad_out = memory.take<A>(P::kTile);
  const auto weights = memory.take<A>(P::kScores), grad_scores = memory.take<A>(P::kScores);

  typename P::Sums grad_k = {}, grad_v = {};
  plain.load(k, args.k, place.batch, first, place.head, count, sizes.dim);
  plain.load(v, args.v, place.batch, first, place.head, count, sizes.dim);
  const int first_query = variant.first_query(sizes, first) / kRows * kRows;
  const int end_query = variant.end_query(sizes, first, count);
  for (int in_group = 0; in_group < sizes.group(); ++in_group) {
    const int head = place.head * sizes.group() + in_group;
    for (int query = first_query; query < end_query; query += kRows) {
      const int rows = std::min(kRows, sizes.queries - query);
      if (variant.skips(sizes, place.batch, query, rows, first, count)) continue;
      __syncthreads();
      plain.load(q, args.q, place.batch, query, head, rows, sizes.dim);
      plain.load(grad_out, args.grad_out, place.batch, query, head, rows, sizes.dim);
      __syncthreads();
      typename P::Scores p, grad_p;
      PlainScores<T, kDim, Variant>{plain, args, variant, place.batch, head, query, first}.make(
          q, k, v, grad_out, p, grad_p);
      plain.put(weights, p);
      plain.put(grad_scores, grad_p);
      __syncthreads();
      plain.template add_weighted_rows<true>(grad_v, weights, grad_out);
      plain.template add_weighted_rows<true>(grad_k, grad_scores, q);
    }
  }
  const auto store = [&](const GradientHeads<T>& gradient, const typename P::Sums& sums, A factor) {
    if (gradient.data != nullptr)
      plain.store(sums, factor, gradient, place.batch, first, place.head, count, sizes.dim,
                  gradient.accumulate);
  };
  store(args.grad_k, grad_k, args.scale);
  store(args.grad_v, grad_v, A(1));
}

template <typename T, int kDim, typename Variant>
__global__ void __launch_bounds__(Plain<T, kDim>::kThreads, Plain<T, kDim>::kBlocks)
    attention_query_gradient_plain_kernel(const AttentionBackwardArgs<T> args,
                                          const Variant variant, int tiles) {
  using P = Plain<T, kDim>;
  using A = typename P::A;
  constexpr int kRows = P::kRows;
  const P plain;
  const AttentionSizes& sizes = args.sizes;
  const AttentionPlace place(tiles, sizes.heads, true);
  const int first = place.tile * kRows, kv_head = place.head / sizes.group();
  const int count = std::min(kRows, sizes.queries - first);
  SharedMemory memory;
  const auto k = memory.take<A>(P::kTile), v = memory.take<A>(P::kTile);
  const auto q = memory.take<A>(P::kTile), grad_out = memory.take<A>(P::kTile);
  const auto grad_scores = memory.take<A>(P::kScores);

  typename P::Sums grad_q = {};
  plain.load(q, args.q, place.batch, first, place.head, count, sizes.dim);
  plain.load(grad_out, args.grad_out, place.batch, first, place.head, count, sizes.dim);
  const int seen = variant.end_key(sizes, first, count);
  for (int key = variant.first_key(sizes, first) / kRows * kRows; key < seen; key += kRows) {
    const int rows = std::min(kRows, sizes.keys - key);
    if (variant.skips(sizes, place.batch, first, count, key, rows)) continue;
    __syncthreads();
    plain.load(k, args.k, place.batch, key, kv_head, rows, sizes.dim);
    plain.load(v, args.v, place.batch, key, kv_head, rows, sizes.dim);
    __syncthreads();
    typename P::Scores p, grad_p;
    PlainScores<T, kDim, Variant>{plain, args, variant, place.batch, place.head, first, key}.make(
        q, k, v, grad_out, p, grad_p);
    plain.put(grad_scores, grad_p);
    __syncwarp(kAllLanes);  // as in forward
    plain.template add_weighted_rows<false>(grad_q, grad_scores, k);
  }
  plain.store(grad_q, args.scale, args.grad_q, place.batch, first, place.head, count, sizes.dim,
              args.grad_q.accumulate);
}

template <typename Variant, typename T>
void launch_attention_forward(Context& context, const AttentionForwardArgs<T>& args,
                              const Variant& variant) {
  const AttentionSizes& sizes = args.sizes;
  visit_plain_head_dim<Compute<T>>(sizes.dim, [&]<int kDim>(std::integral_constant<int, kDim>) {
    using P = Plain<T, kDim>;
    const int tiles = divide_up(sizes.queries, P::kRows);
    launch(context, "attention_forward", attention_forward_plain_kernel<T, kDim, Variant>,
           LaunchShape{attention_blocks("attention_forward", tiles, sizes.heads, sizes.batch),
                       P::kThreads, P::shared_bytes(3, 1)},
           args, variant, tiles);
  });
}

template <typename Variant, typename T>
void launch_attention_backward(Context& context, const AttentionBackwardArgs<T>& args,
                               const Variant& variant) {
  constexpr const char* kName = "attention_backward";
  const AttentionSizes& sizes = args.sizes;
  visit_plain_head_dim<Compute<T>>(sizes.dim, [&]<int kDim>(std::integral_constant<int, kDim>) {
    using P = Plain<T, kDim>;
    if (args.grad_k.data != nullptr || args.grad_v.data != nullptr) {
      const int tiles = divide_up(sizes.keys, P::kRows);
      launch(context, "attention_backward: keys",
             attention_key_gradient_plain_kernel<T, kDim, Variant>,
             LaunchShape{attention_blocks(kName, tiles, sizes.kv_heads, sizes.batch), P::kThreads,
                         P::shared_bytes(4, 2)},
             args, variant, tiles);
    }
    if (args.grad_q.data != nullptr && sizes.queries > 0) {
      const int tiles = divide_up(sizes.queries, P::kRows);
      launch(context, "attention_backward: queries",
             attention_query_gradient_plain_kernel<T, kDim, Variant>,
             LaunchShape{attention_blocks(kName, tiles, sizes.heads, sizes.batch), P::kThreads,
                         P::shared_bytes(4, 1)},
             args, variant, tiles);
    }
  });
}

}  // namespace
}  // namespace tessera::kernels::cuda
