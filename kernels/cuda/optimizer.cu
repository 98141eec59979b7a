#include <algorithm>
#include <cmath>

#include "kernels/cuda/device/random.h"
#include "kernels/cuda/sums.h"
#include "kernels/optimizer.h"

namespace tessera::kernels::cuda {
namespace {

// Rounds away from zero with a probability equal to the discarded fraction.
__device__ __forceinline__ BFloat16 round_stochastically(float value, std::uint32_t random) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7f800000U) == 0x7f800000U) return narrow<BFloat16>(value);
  BFloat16 result;
  result.bits = static_cast<unsigned short>((bits + (random & 0xffffU)) >> 16);
  return result;
}

// Memory-bound: per f32 weight, reads 16 bytes and writes 12, or 14 with the copy.
template <typename P, bool kCopy, bool kStochastic>
struct AdamWBody {
  P* param;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  BFloat16* copy;
  const float* factor;
  AdamWRates rates;
  const RngStep* rng;
  std::uint64_t step;
  AdamWRange range{};

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t at,
                                             std::integral_constant<int, N>) const {
    const std::int64_t i = range.begin + at;
    float g_scale = rates.scale;
    if (factor != nullptr) {
      const float clip = *factor;
      if (clip != clip) return;
      g_scale *= clip;
    }
    const Pack<float, N> gradients = load_pack<N>(grad + i);
    Pack<float, N> m = load_pack<N>(exp_avg + i);
    Pack<float, N> v = load_pack<N>(exp_avg_sq + i);
    Pack<P, N> weights = load_pack<N>(param + i);
    Pack<BFloat16, N> rounded;
    std::uint32_t words[N];
    if constexpr (kStochastic)
      draw<N>(RngKey::make(rng->seed, RngPurpose::Rounding, step, range.place),
              range.first_element + static_cast<std::uint64_t>(at), words);
    for (int k = 0; k < N; ++k) {
      const float g = g_scale * gradients[k];
      m[k] = rates.beta1 * m[k] + rates.one_minus_beta1 * g;
      v[k] = rates.beta2 * v[k] + rates.one_minus_beta2 * g * g;
      const float value = widen(weights[k]) * range.decay -
                          range.rate * m[k] / (std::sqrt(v[k]) * rates.v_scale + rates.eps);
      if constexpr (kStochastic)
        weights[k] = round_stochastically(value, words[k]);
      else
        weights[k] = narrow<P>(value);
      if constexpr (kCopy) rounded[k] = narrow<BFloat16>(value);
    }
    store_pack<N>(exp_avg + i, m);
    store_pack<N>(exp_avg_sq + i, v);
    store_pack<N>(param + i, weights);
    if constexpr (kCopy) store_pack<N>(copy + i, rounded);
  }
};

// Ranges of one launch; blocks [first_block[r], first_block[r + 1]) update range r.
struct AdamWRanges {
  static constexpr int kMost = 64;
  AdamWRange range[kMost];
  unsigned first_block[kMost + 1] = {};
};

template <int N, typename Body>
__global__ void __launch_bounds__(ElementwiseShape::kThreads)
    adamw_kernel(AdamWRanges ranges, Body body) {
  static_assert(sizeof(ranges) + sizeof(body) <= 4096, "the limit of a kernel's arguments");
  int r = 0;
  while (ranges.first_block[r + 1] <= blockIdx.x) ++r;
  body.range = ranges.range[r];
  const unsigned block = blockIdx.x - ranges.first_block[r];
  const unsigned blocks = ranges.first_block[r + 1] - ranges.first_block[r];
  for_packs<N>(body.range.end - body.range.begin, block * blockDim.x + threadIdx.x,
               blocks * blockDim.x, body);
}

template <typename P, bool kCopy, bool kStochastic>
void run(Context& context, const AdamW& args) {
  const AdamWBody<P, kCopy, kStochastic> body{
      .param = static_cast<P*>(args.param.data),
      .grad = static_cast<const float*>(args.grad.data),
      .exp_avg = static_cast<float*>(args.exp_avg.data),
      .exp_avg_sq = static_cast<float*>(args.exp_avg_sq.data),
      .copy = static_cast<BFloat16*>(args.copy.data),
      .factor = static_cast<const float*>(args.factor.data),
      .rates = args.rates,
      .rng = args.rng,
      .step = static_cast<std::uint64_t>(args.step)};
  constexpr int kWidth = kPack<float>;
  const bool aligned =
      is_aligned(body.param, body.grad, body.exp_avg, body.exp_avg_sq, body.copy) &&
      std::ranges::all_of(args.ranges, [](const AdamWRange& r) { return r.begin % kWidth == 0; });
  for (std::size_t done = 0; done < args.ranges.size();) {
    AdamWRanges ranges;
    unsigned blocks = 0;
    for (int r = 0; r < AdamWRanges::kMost && done < args.ranges.size(); ++r, ++done) {
      ranges.range[r] = args.ranges[done];
      blocks += ElementwiseShape::blocks(ranges.range[r].end - ranges.range[r].begin,
                                         aligned ? kWidth : 1);
      ranges.first_block[r + 1] = blocks;
    }
    visit_pack<float>(aligned, [&]<int N>(std::integral_constant<int, N>) {
      launch(context, "adamw", adamw_kernel<N, AdamWBody<P, kCopy, kStochastic>>,
             LaunchShape{blocks, ElementwiseShape::kThreads}, ranges, body);
    });
  }
}

struct Square {
  __device__ __forceinline__ double operator()(double x) const { return x * x; }
};

struct StoreDouble {
  double* to;
  __device__ __forceinline__ void operator()(double sum) const { *to = sum; }
};

__device__ __forceinline__ bool is_finite(double x) { return x - x == 0; }

__global__ void clip_factor_kernel(const double* totals, int count, double max_norm,
                                   float* factor) {
  if (threadIdx.x != 0) return;
  bool finite = true;
  for (int i = 0; i < count; ++i) finite = finite && is_finite(totals[i]);
  double clip = 1;
  if (max_norm > 0) {
    const double wanted = max_norm / (std::sqrt(totals[0]) + 1e-6);
    clip = wanted < 1 ? wanted : 1;
  }
  *factor = finite ? static_cast<float>(clip) : __uint_as_float(0x7fc00000U);
}

}  // namespace

void adamw(Context& context, const AdamW& args) {
  if (args.param.dtype == DType::BF16 && args.stochastic)
    run<BFloat16, false, true>(context, args);
  else if (args.param.dtype == DType::BF16)
    run<BFloat16, false, false>(context, args);
  else if (args.copy.data != nullptr)
    run<float, true, false>(context, args);
  else
    run<float, false, false>(context, args);
}

void sum_of_squares(Context& context, const SumOfSquares& args) {
  launch_sum(context, "sum_of_squares", static_cast<const float*>(args.x.data), args.x.numel(),
             Square{}, StoreDouble{static_cast<double*>(args.sum.data)});
}

void clip_factor(Context& context, const ClipFactor& args) {
  launch(context, "clip_factor", clip_factor_kernel, LaunchShape{1, kWarpSize},
         static_cast<const double*>(args.totals.data), static_cast<int>(args.totals.numel()),
         args.max_norm, static_cast<float*>(args.factor.data));
}

TESSERA_CUDA_KERNEL(adamw, AdamW)
TESSERA_CUDA_KERNEL(sum_of_squares, SumOfSquares)
TESSERA_CUDA_KERNEL(clip_factor, ClipFactor)

}  // namespace tessera::kernels::cuda
