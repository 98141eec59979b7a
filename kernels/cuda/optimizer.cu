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

/// 1 - lr wd, or 1 for a weight that does not decay.
__device__ __forceinline__ float decay_of(bool cautious, float decay, float update, float param) {
  return cautious && update * param < 0 ? 1.0F : decay;
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
  bool cautious;
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
      const float old = widen(weights[k]);
      const float value = old * decay_of(cautious, range.decay, m[k], old) -
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
      .step = static_cast<std::uint64_t>(args.step),
      .cautious = args.decay == Decay::Shrinking};
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

template <typename Out>
struct MomentumBody {
  const float* grad;
  float* momentum;
  Out* out;
  const float* factor;
  float beta, rest;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const float clip = *factor;
    if (clip != clip) return;
    const Pack<float, N> gradients = load_pack<N>(grad + i);
    Pack<float, N> m = load_pack<N>(momentum + i);
    Pack<Out, N> result;
    for (int k = 0; k < N; ++k) {
      const float g = rest * (clip * gradients[k]);
      m[k] = beta * m[k] + g;
      result[k] = narrow<Out>(beta * m[k] + g);
    }
    store_pack<N>(momentum + i, m);
    store_pack<N>(out + i, result);
  }
};

template <typename Out>
struct NormalizeBody {
  const float* x;
  const double* sum;
  Out* out;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const double norm = std::sqrt(*sum);
    const auto factor = static_cast<float>(1.0 / (norm > 1e-7 ? norm : 1e-7));
    const Pack<float, N> from = load_pack<N>(x + i);
    Pack<Out, N> to;
    for (int k = 0; k < N; ++k) to[k] = narrow<Out>(factor * from[k]);
    store_pack<N>(out + i, to);
  }
};

template <typename Out>
void run_momentum(Context& context, const MuonMomentum& args) {
  const MomentumBody<Out> body{.grad = static_cast<const float*>(args.grad.data),
                               .momentum = static_cast<float*>(args.momentum.data),
                               .out = static_cast<Out*>(args.out.data),
                               .factor = static_cast<const float*>(args.factor.data),
                               .beta = static_cast<float>(args.beta),
                               .rest = static_cast<float>(1.0 - args.beta)};
  launch_elementwise<kPack<float>>(context, "muon_momentum", args.grad.numel(),
                                   is_aligned(body.grad, body.momentum, body.out), body);
}

template <typename Out>
void run_normalize(Context& context, const Normalize& args) {
  const NormalizeBody<Out> body{static_cast<const float*>(args.x.data),
                                static_cast<const double*>(args.sum.data),
                                static_cast<Out*>(args.out.data)};
  launch_elementwise<kPack<float>>(context, "normalize", args.x.numel(),
                                   is_aligned(body.x, body.out), body);
}

template <typename P, typename U>
struct UpdateBody {
  P* param;
  const U* update;
  BFloat16* copy;
  const float* factor;
  float decay, rate;
  bool cautious;
  const RngStep* rng;  // null: rounds to nearest
  std::uint64_t step, place, first_element;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    if (*factor != *factor) return;
    const Pack<U, N> updates = load_pack<N>(update + i);
    Pack<P, N> weights = load_pack<N>(param + i);
    Pack<BFloat16, N> rounded;
    std::uint32_t words[N] = {};
    if (rng != nullptr)
      draw<N>(RngKey::make(rng->seed, RngPurpose::Rounding, step, place),
              first_element + static_cast<std::uint64_t>(i), words);
    for (int k = 0; k < N; ++k) {
      const float old = widen(weights[k]), u = widen(updates[k]);
      const float value = old * decay_of(cautious, decay, u, old) - rate * u;
      weights[k] = narrow<P>(value);
      if constexpr (std::is_same_v<P, BFloat16>)
        if (rng != nullptr) weights[k] = round_stochastically(value, words[k]);
      rounded[k] = narrow<BFloat16>(value);
    }
    store_pack<N>(param + i, weights);
    if (copy != nullptr) store_pack<N>(copy + i, rounded);
  }
};

template <typename P, typename U>
void run_update(Context& context, const WeightUpdate& args) {
  const UpdateBody<P, U> body{.param = static_cast<P*>(args.param.data),
                              .update = static_cast<const U*>(args.update.data),
                              .copy = static_cast<BFloat16*>(args.copy.data),
                              .factor = static_cast<const float*>(args.factor.data),
                              .decay = static_cast<float>(1.0 - args.lr * args.weight_decay),
                              .rate = static_cast<float>(args.rate),
                              .cautious = args.decay == Decay::Shrinking,
                              .rng = args.stochastic ? args.rng : nullptr,
                              .step = static_cast<std::uint64_t>(args.step),
                              .place = args.place,
                              .first_element = args.first_element};
  launch_elementwise<kPack<float>>(context, "weight_update", args.param.numel(),
                                   is_aligned(body.param, body.update, body.copy), body);
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

void muon_momentum(Context& context, const MuonMomentum& args) {
  if (args.out.dtype == DType::BF16)
    run_momentum<BFloat16>(context, args);
  else
    run_momentum<float>(context, args);
}

void normalize(Context& context, const Normalize& args) {
  if (args.out.dtype == DType::BF16)
    run_normalize<BFloat16>(context, args);
  else
    run_normalize<float>(context, args);
}

void weight_update(Context& context, const WeightUpdate& args) {
  const bool is_half = args.param.dtype == DType::BF16;
  if (args.update.dtype == DType::BF16)
    is_half ? run_update<BFloat16, BFloat16>(context, args)
            : run_update<float, BFloat16>(context, args);
  else
    is_half ? run_update<BFloat16, float>(context, args) : run_update<float, float>(context, args);
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
TESSERA_CUDA_KERNEL(muon_momentum, MuonMomentum)
TESSERA_CUDA_KERNEL(normalize, Normalize)
TESSERA_CUDA_KERNEL(weight_update, WeightUpdate)
TESSERA_CUDA_KERNEL(sum_of_squares, SumOfSquares)
TESSERA_CUDA_KERNEL(clip_factor, ClipFactor)

}  // namespace tessera::kernels::cuda
