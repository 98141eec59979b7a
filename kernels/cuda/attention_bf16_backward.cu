#include <algorithm>

#include "kernels/cuda/attention_tiles.h"

// With P = exp(scale Q K^T - log_sum_exp), the gradients are
//   dV = P^T dO,  dS = P * (dO V^T - delta),  dQ = scale dS K,  dK = scale dS^T Q.
// dK and dV are sums over queries, dQ over keys. Two kernels each compute P and dS: seven matrix
// products instead of five. One kernel would need atomics on dQ (no fixed order of sums) or an f32
// dQ per tile of keys. P and dS stay in registers, where the result of a product is laid out as the
// left operand of the next. Bound by the tensor cores for long sequences.
namespace tessera::kernels::cuda {
namespace {

// A block owns a tile of keys of one kv head. It loops in order over the query heads that share it,
// and over their queries that see the keys. Scores are transposed: keys by queries.
template <int kDim>
__global__ void __launch_bounds__(AttentionKeyShape<kDim>::kThreads)
    attention_key_gradient_bf16_kernel(const AttentionBackwardArgs<BFloat16> args, int tiles) {
  using Shape = AttentionKeyShape<kDim>;
  constexpr int kThreads = Shape::kThreads, kRows = Shape::kRows, kStep = Shape::kStep;
  constexpr int M = Shape::kRowTiles, N = kStep / 8, kWidth = Shape::kPartDim / 8;
  const AttentionSizes& sizes = args.sizes;
  const AttentionPlace place(tiles * Shape::kParts, sizes.kv_heads, false);
  const int first = place.tile / Shape::kParts * kRows;
  const int part_chunk = place.tile % Shape::kParts * kWidth;
  const int count = std::min(kRows, sizes.keys - first);

  SharedMemory memory;
  const Bf16Tile k = memory.take<BFloat16>(kRows * kDim);
  const Bf16Tile v = memory.take<BFloat16>(kRows * kDim);
  const Bf16Tile queries = memory.take<BFloat16>(2 * kStep * kDim);
  const Bf16Tile grad_outs = memory.take<BFloat16>(2 * kStep * kDim);
  const SharedArray<float> log_sum_exps = memory.take<float>(2 * kStep);
  const SharedArray<float> deltas = memory.take<float>(2 * kStep);

  // A step is a query tile of a head; the first tile is the first that sees a key of this block.
  const int first_tile = std::max(0, first - sizes.past()) / kStep;
  const int of_head = (sizes.queries + kStep - 1) / kStep - first_tile;
  const int steps = of_head * sizes.group();
  const auto load_step = [&](int step) {
    const int head = place.head * sizes.group() + step / of_head;
    const int query = (first_tile + step % of_head) * kStep, stage = step % 2 * kStep;
    const int rows = std::min(kStep, sizes.queries - query);
    load_tile<kThreads, kStep, kDim>(queries.from(stage * kDim), args.q, place.batch, query, head,
                                     rows, sizes.dim);
    load_tile<kThreads, kStep, kDim>(grad_outs.from(stage * kDim), args.grad_out, place.batch,
                                     query, head, rows, sizes.dim);
    commit_copies();
    const int i = static_cast<int>(threadIdx.x);
    if (i < kStep) {
      const std::int64_t at =
          (std::int64_t{place.batch} * sizes.heads + head) * sizes.queries + query + i;
      // Infinity makes P 0 beyond the last query.
      log_sum_exps[stage + i] =
          i < rows ? args.log_sum_exp[at] * kLog2E : std::numeric_limits<float>::infinity();
      deltas[stage + i] = i < rows ? args.delta[at] : 0.0F;
    }
  };

  const Lane at;
  const int warp_row = static_cast<int>(threadIdx.x) / kWarpSize * M * 16;
  const int warp_count = std::min(M * 16, count - warp_row);
  const float scale = args.scale * kLog2E;
  FragmentC grad_k[M][kWidth] = {}, grad_v[M][kWidth] = {};

  load_tile<kThreads, kRows, kDim>(k, args.k, place.batch, first, place.head, count, sizes.dim);
  load_tile<kThreads, kRows, kDim>(v, args.v, place.batch, first, place.head, count, sizes.dim);
  if (steps > 0) load_step(0);
  for (int step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();
    if (step + 1 < steps) load_step(step + 1);
    const int last_visible = (first_tile + step % of_head) * kStep + sizes.past();  // to query 0
    const int stage = step % 2 * kStep;
    if (warp_count <= 0 || first + warp_row > last_visible + kStep - 1) continue;

    FragmentC weights[M][N] = {};
    add_product_of_rows<kDim>(weights, k, warp_row, queries.from(stage * kDim));
    const bool masked = first + warp_row + M * 16 - 1 > last_visible;
    TESSERA_UNROLL
    for (int n = 0; n < N; ++n) {
      const int query = 8 * n + 2 * at.in_group;
      const Pack<float, 2> shift = log_sum_exps.load<2>(stage + query);
      TESSERA_UNROLL
      for (int m = 0; m < M; ++m) {
        TESSERA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int key = first + warp_row + 16 * m + i / 2 * 8 + at.group;
          float& weight = weights[m][n].x[i];
          weight = fast_exp2(weight * scale - shift[i % 2]);
          if (masked && key > last_visible + query + i % 2) weight = 0;
        }
      }
    }
    add_weighted_rows<kDim>(grad_v, weights, grad_outs.from(stage * kDim), part_chunk);

    FragmentC grad_scores[M][N] = {};
    add_product_of_rows<kDim>(grad_scores, v, warp_row, grad_outs.from(stage * kDim));
    TESSERA_UNROLL
    for (int n = 0; n < N; ++n) {
      const Pack<float, 2> delta = deltas.load<2>(stage + 8 * n + 2 * at.in_group);
      TESSERA_UNROLL
      for (int m = 0; m < M; ++m) {
        TESSERA_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& grad_score = grad_scores[m][n].x[i];
          grad_score = weights[m][n].x[i] * (grad_score - delta[i % 2]);
        }
      }
    }
    add_weighted_rows<kDim>(grad_k, grad_scores, queries.from(stage * kDim), part_chunk);
  }
  if (steps == 0) {  // the copies of k and v are still under way
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  }
  if (warp_count <= 0) return;

  float ones[M][2], scales[M][2];
  TESSERA_UNROLL
  for (int m = 0; m < M; ++m) {
    ones[m][0] = ones[m][1] = 1;
    scales[m][0] = scales[m][1] = args.scale;
  }
  __syncwarp(kAllLanes);  // the warp's rows of k and v have been read
  put_rows<kDim>(k, warp_row, part_chunk, grad_k, scales);
  put_rows<kDim>(v, warp_row, part_chunk, grad_v, ones);
  __syncwarp(kAllLanes);
  const auto store = [&](const Bf16Tile& tile, const GradientHeads<BFloat16>& gradient) {
    if (gradient.data == nullptr) return;
    store_tile<M * 16, kDim, Shape::kPartDim>(
        tile, warp_row, part_chunk * 8, gradient.at(place.batch, first + warp_row, place.head),
        gradient.token, warp_count, sizes.dim, gradient.packs, gradient.accumulate);
  };
  store(k, args.grad_k);
  store(v, args.grad_v);
}

// A block owns a tile of queries of one head and loops over the keys that they see.
template <int kDim>
__global__ void __launch_bounds__(AttentionQueryShape<kDim>::kThreads, 2)
    attention_query_gradient_bf16_kernel(const AttentionBackwardArgs<BFloat16> args, int tiles) {
  using Shape = AttentionQueryShape<kDim>;
  constexpr int kThreads = Shape::kThreads, kRows = Shape::kRows, kStep = Shape::kStep;
  constexpr int M = Shape::kRowTiles, N = kStep / 8, kWidth = kDim / 8;
  const AttentionSizes& sizes = args.sizes;
  const AttentionPlace place(tiles, sizes.heads, true);
  const int first = place.tile * kRows, kv_head = place.head / sizes.group();
  const int count = std::min(kRows, sizes.queries - first);

  SharedMemory memory;
  const Bf16Tile q = memory.take<BFloat16>(kRows * kDim);
  const Bf16Tile grad_out = memory.take<BFloat16>(kRows * kDim);
  const Bf16Tile keys = memory.take<BFloat16>(2 * kStep * kDim);
  const Bf16Tile values = memory.take<BFloat16>(2 * kStep * kDim);
  const auto load_step = [&](int step) {
    const int key = step * kStep, rows = std::min(kStep, sizes.keys - key);
    const int stage = step % 2 * kStep * kDim;
    load_tile<kThreads, kStep, kDim>(keys.from(stage), args.k, place.batch, key, kv_head, rows,
                                     sizes.dim);
    load_tile<kThreads, kStep, kDim>(values.from(stage), args.v, place.batch, key, kv_head, rows,
                                     sizes.dim);
    commit_copies();
  };

  const Lane at;
  const int warp_row = static_cast<int>(threadIdx.x) / kWarpSize * M * 16;
  const int warp_count = std::min(M * 16, count - warp_row);
  const int last_visible = first + warp_row + warp_count - 1 + sizes.past();
  const float scale = args.scale * kLog2E;
  float shifts[M][2], deltas[M][2];
  TESSERA_UNROLL
  for (int m = 0; m < M; ++m) {
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * m + 8 * half + at.group;
      const std::int64_t head = std::int64_t{place.batch} * sizes.heads + place.head;
      const std::int64_t index = head * sizes.queries + first + row;
      shifts[m][half] = row < count ? args.log_sum_exp[index] * kLog2E : 0.0F;
      deltas[m][half] = row < count ? args.delta[index] : 0.0F;
    }
  }
  FragmentC grad_q[M][kWidth] = {};

  load_tile<kThreads, kRows, kDim>(q, args.q, place.batch, first, place.head, count, sizes.dim);
  load_tile<kThreads, kRows, kDim>(grad_out, args.grad_out, place.batch, first, place.head, count,
                                   sizes.dim);
  load_step(0);
  const int steps = (first + count + sizes.past() + kStep - 1) / kStep;
  for (int step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();
    if (step + 1 < steps) load_step(step + 1);
    const int key = step * kStep, stage = step % 2 * kStep * kDim;
    if (warp_count <= 0 || key > last_visible) continue;

    FragmentC weights[M][N] = {}, grad_scores[M][N] = {};
    add_product_of_rows<kDim>(weights, q, warp_row, keys.from(stage));
    add_product_of_rows<kDim>(grad_scores, grad_out, warp_row, values.from(stage));
    const bool masked = key + kStep - 1 > first + warp_row + sizes.past();
    TESSERA_UNROLL
    for (int m = 0; m < M; ++m) {
      TESSERA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2;
        const int row = warp_row + 16 * m + 8 * half + at.group;
        const int visible = first + row + sizes.past() - key;
        TESSERA_UNROLL
        for (int n = 0; n < N; ++n) {
          float weight = fast_exp2(weights[m][n].x[i] * scale - shifts[m][half]);
          if (masked && 8 * n + 2 * at.in_group + i % 2 > visible) weight = 0;
          float& grad_score = grad_scores[m][n].x[i];
          grad_score = weight * (grad_score - deltas[m][half]);
        }
      }
    }
    add_weighted_rows<kDim>(grad_q, grad_scores, keys.from(stage), 0);
  }
  if (warp_count <= 0) return;

  float scales[M][2];
  TESSERA_UNROLL
  for (int m = 0; m < M; ++m) scales[m][0] = scales[m][1] = args.scale;
  __syncwarp(kAllLanes);  // the warp's rows of q have been read
  put_rows<kDim>(q, warp_row, 0, grad_q, scales);
  __syncwarp(kAllLanes);
  store_tile<M * 16, kDim, kDim>(
      q, warp_row, 0, args.grad_q.at(place.batch, first + warp_row, place.head), args.grad_q.token,
      warp_count, sizes.dim, args.grad_q.packs, args.grad_q.accumulate);
}

}  // namespace

int attention_backward_bf16_shared_bytes(std::int64_t head_dim) {
  int bytes = 0;
  visit_bf16_head_dim(head_dim, [&]<int kDim>(std::integral_constant<int, kDim>) {
    bytes =
        std::max(AttentionKeyShape<kDim>::kSharedBytes, AttentionQueryShape<kDim>::kSharedBytes);
  });
  return bytes;
}

void attention_backward_bf16(Context& context, const AttentionBackwardArgs<BFloat16>& args) {
  constexpr const char* kName = "attention_backward";
  const AttentionSizes& sizes = args.sizes;
  visit_bf16_head_dim(sizes.dim, [&]<int kDim>(std::integral_constant<int, kDim>) {
    if (args.grad_k.data != nullptr || args.grad_v.data != nullptr) {
      using Shape = AttentionKeyShape<kDim>;
      const int tiles = divide_up(sizes.keys, Shape::kRows);
      launch(
          context, "attention_backward: keys", attention_key_gradient_bf16_kernel<kDim>,
          LaunchShape{attention_blocks(kName, tiles * Shape::kParts, sizes.kv_heads, sizes.batch),
                      Shape::kThreads, Shape::kSharedBytes},
          args, tiles);
    }
    if (args.grad_q.data != nullptr && sizes.queries > 0) {
      using Shape = AttentionQueryShape<kDim>;
      const int tiles = divide_up(sizes.queries, Shape::kRows);
      launch(context, "attention_backward: queries", attention_query_gradient_bf16_kernel<kDim>,
             LaunchShape{attention_blocks(kName, tiles, sizes.heads, sizes.batch), Shape::kThreads,
                         Shape::kSharedBytes},
             args, tiles);
    }
  });
}

}  // namespace tessera::kernels::cuda
