#include <algorithm>

#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/device/reduce.h"

namespace tessera::kernels::cuda {
namespace {

// A block owns a tile of queries of one head and loops over the keys that they see, from the first,
// so that every row sees a key before a fully masked tile. The next tile of keys and values is
// loaded while the current one is used. A warp owns whole rows, so that their maximum and sum need
// shuffles among four lanes only. exp2 takes scores times log2(e), multiplied and subtracted in one
// instruction.
//
// Bound by the tensor cores for long sequences (4 D operations per score, besides an exp2 and some
// four other operations), and by the latency of the first tile for short ones.
template <int kDim>
__global__ void __launch_bounds__(AttentionForwardShape<kDim>::kThreads)
    attention_forward_bf16_kernel(const AttentionForwardArgs<BFloat16> args, int tiles) {
  using Shape = AttentionForwardShape<kDim>;
  constexpr int kThreads = Shape::kThreads, kRows = Shape::kRows, kStep = Shape::kStep;
  constexpr int M = Shape::kRowTiles, N = kStep / 8, kWidth = kDim / 8;
  const AttentionSizes& sizes = args.sizes;
  const AttentionPlace place(tiles, sizes.heads, true);
  const int first = place.tile * kRows, kv_head = place.head / sizes.group();
  const int count = std::min(kRows, sizes.queries - first);
  const int seen = first + count + sizes.past();

  SharedMemory memory;
  const Bf16Tile q = memory.take<BFloat16>(kRows * kDim);
  const Bf16Tile keys = memory.take<BFloat16>(2 * kStep * kDim);
  const Bf16Tile values = memory.take<BFloat16>(2 * kStep * kDim);
  const auto stage = [](int tile) { return tile % 2 * kStep * kDim; };
  const auto load_step = [&](int tile) {
    const int key = tile * kStep, rows = std::min(kStep, sizes.keys - key);
    load_tile<kThreads, kStep, kDim>(keys.from(stage(tile)), args.k, place.batch, key, kv_head,
                                     rows, sizes.dim);
    load_tile<kThreads, kStep, kDim>(values.from(stage(tile)), args.v, place.batch, key, kv_head,
                                     rows, sizes.dim);
    commit_copies();
  };

  const Lane at;
  const int warp_row = static_cast<int>(threadIdx.x) / kWarpSize * M * 16;
  const int warp_count = std::min(M * 16, count - warp_row);  // may be 0 or less
  const int last_visible = first + warp_row + warp_count - 1 + sizes.past();
  const float scale = args.scale * kLog2E;

  FragmentC sums[M][kWidth] = {};
  float maxima[M][2], totals[M][2] = {};
  TESSERA_UNROLL
  for (int m = 0; m < M; ++m) maxima[m][0] = maxima[m][1] = std::numeric_limits<float>::lowest();

  load_tile<kThreads, kRows, kDim>(q, args.q, place.batch, first, place.head, count, sizes.dim);
  load_step(0);
  const int steps = (seen + kStep - 1) / kStep;
  for (int step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();
    if (step + 1 < steps) load_step(step + 1);
    const int key = step * kStep;
    if (warp_count <= 0 || key > last_visible) continue;

    FragmentC scores[M][N] = {};
    add_product_of_rows<kDim>(scores, q, warp_row, keys.from(stage(step)));
    const bool masked = key + kStep - 1 > first + warp_row + sizes.past();
    TESSERA_UNROLL
    for (int m = 0; m < M; ++m) {
      TESSERA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + 16 * m + 8 * half + at.group;
        const int visible = first + row + sizes.past() - key;  // last visible column
        float highest = maxima[m][half];
        TESSERA_UNROLL
        for (int n = 0; n < N; ++n) {
          TESSERA_UNROLL
          for (int i = 0; i < 2; ++i) {
            float& score = scores[m][n].x[2 * half + i];
            if (masked && 8 * n + 2 * at.in_group + i > visible)
              score = -std::numeric_limits<float>::infinity();
            highest = fmaxf(highest, score);
          }
        }
        highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
        const float factor = fast_exp2((maxima[m][half] - highest) * scale);
        maxima[m][half] = highest;
        const float shift = highest * scale;
        float total = totals[m][half] * factor;  // of the columns of this lane
        TESSERA_UNROLL
        for (int n = 0; n < N; ++n) {
          TESSERA_UNROLL
          for (int i = 0; i < 2; ++i) {
            float& score = scores[m][n].x[2 * half + i];
            score = fast_exp2(score * scale - shift);
            total += score;
          }
        }
        totals[m][half] = total;
        TESSERA_UNROLL
        for (int n = 0; n < kWidth; ++n) {
          sums[m][n].x[2 * half] *= factor;
          sums[m][n].x[2 * half + 1] *= factor;
        }
      }
    }
    add_weighted_rows<kDim>(sums, scores, values.from(stage(step)), 0);
  }
  if (warp_count <= 0) return;

  float factors[M][2];
  TESSERA_UNROLL
  for (int m = 0; m < M; ++m) {
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      float total = totals[m][half];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      factors[m][half] = 1 / total;
      const int row = warp_row + 16 * m + 8 * half + at.group;
      if (args.log_sum_exp != nullptr && at.in_group == 0 && row < count) {
        const std::int64_t head = std::int64_t{place.batch} * sizes.heads + place.head;
        args.log_sum_exp[head * sizes.queries + first + row] =
            (maxima[m][half] * scale + log2f(total)) * kLn2;
      }
    }
  }
  __syncwarp(kAllLanes);  // the warp's rows of q have been read
  put_rows<kDim>(q, warp_row, 0, sums, factors);
  __syncwarp(kAllLanes);
  store_tile<M * 16, kDim, kDim>(q, warp_row, 0,
                                 args.out.at(place.batch, first + warp_row, place.head),
                                 args.out.token, warp_count, sizes.dim, args.out.packs, false);
}

}  // namespace

void attention_forward_bf16(Context& context, const AttentionForwardArgs<BFloat16>& args) {
  const AttentionSizes& sizes = args.sizes;
  visit_bf16_head_dim(sizes.dim, [&]<int kDim>(std::integral_constant<int, kDim>) {
    using Shape = AttentionForwardShape<kDim>;
    const int tiles = divide_up(sizes.queries, Shape::kRows);
    launch(context, "attention_forward", attention_forward_bf16_kernel<kDim>,
           LaunchShape{attention_blocks("attention_forward", tiles, sizes.heads, sizes.batch),
                       Shape::kThreads, Shape::kSharedBytes},
           args, tiles);
  });
}

}  // namespace tessera::kernels::cuda
