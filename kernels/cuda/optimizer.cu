#include <algorithm>
#include <cmath>

#include "kernels/cuda/device/random.h"
#include "kernels/cuda/sums.h"
#include "kernels/moment_code.h"
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

// 16 threads update a block of 64 elements, 4 each. Memory-bound: per f32 weight reads 10 bytes and
// writes 6.
template <typename P>
struct AdamW8bitBody {
  static constexpr int kTeam = 16, kEach = 4;
  P* param;
  const float* grad;
  signed char* exp_avg;
  unsigned char* exp_avg_sq;
  float* exp_avg_scale;
  float* exp_avg_sq_scale;
  BFloat16* copy;
  const float* factor;
  AdamWRates rates;
  const RngStep* rng;  // null: rounds weights to nearest
  std::uint64_t step;
  bool cautious;
  AdamWRange range;
  std::uint32_t key;

  /// @param block  number within the range; all threads of a warp call this
  __device__ void update(std::int64_t block, int thread, float g_scale) const {
    const std::int64_t length = range.end - range.begin;
    const std::int64_t offset = block * kMomentBlock + thread * kEach, i = range.begin + offset;
    const bool is_inside = block * kMomentBlock < length;
    const std::int64_t scale_at = (range.begin + block * kMomentBlock) / kMomentBlock;
    const float m_scale = is_inside ? exp_avg_scale[scale_at] : 0;
    const float v_scale = is_inside ? exp_avg_sq_scale[scale_at] : 0;
    float m[kEach], v[kEach], m_most = 0, v_most = 0;
    for (int k = 0; k < kEach; ++k) {
      m[k] = v[k] = 0;
      if (offset + k >= length) continue;
      const float g = g_scale * grad[i + k];
      m[k] = rates.beta1 * (m_scale * decode_first(exp_avg[i + k])) + rates.one_minus_beta1 * g;
      v[k] = rates.beta2 * (v_scale * decode_second(exp_avg_sq[i + k])) +
             rates.one_minus_beta2 * g * g;
      const float old = widen(param[i + k]);
      const float value = old * decay_of(cautious, range.decay, m[k], old) -
                          range.rate * m[k] / (std::sqrt(v[k]) * rates.v_scale + rates.eps);
      if (copy != nullptr) copy[i + k] = narrow<BFloat16>(value);
      if constexpr (std::is_same_v<P, BFloat16>) {
        if (rng != nullptr) {
          std::uint32_t word[1];
          draw<1>(RngKey::make(rng->seed, RngPurpose::Rounding, step, range.place),
                  range.first_element + static_cast<std::uint64_t>(offset + k), word);
          param[i + k] = round_stochastically(value, word[0]);
        } else {
          param[i + k] = narrow<P>(value);
        }
      } else {
        param[i + k] = value;
      }
      m_most = fmaxf(m_most, fabsf(m[k]));
      v_most = fmaxf(v_most, v[k]);
    }
    for (int lanes = kTeam / 2; lanes > 0; lanes /= 2) {
      m_most = fmaxf(m_most, __shfl_xor_sync(kAllLanes, m_most, lanes));
      v_most = fmaxf(v_most, __shfl_xor_sync(kAllLanes, v_most, lanes));
    }
    const float m_part = moment_part(m_most);
    const float v_part = moment_part(v_most);
    for (int k = 0; k < kEach; ++k) {
      if (offset + k >= length) continue;
      const std::uint32_t bits = mixed(key ^ (static_cast<std::uint32_t>(range.first_element) +
                                              static_cast<std::uint32_t>(offset + k)));
      const float x = m[k] * m_part, y = v[k] * v_part;
      exp_avg[i + k] =
          static_cast<signed char>(encode_first(x, std::sqrt(fabsf(x)), first_random(bits)));
      exp_avg_sq[i + k] = static_cast<unsigned char>(
          encode_second(y, std::sqrt(std::sqrt(y)), second_random(bits)));
    }
    if (thread != 0 || !is_inside) return;
    exp_avg_scale[scale_at] = moment_scale(m_most);
    exp_avg_sq_scale[scale_at] = moment_scale(v_most);
  }
};

template <typename P>
__global__ void __launch_bounds__(ElementwiseShape::kThreads)
    adamw_8bit_kernel(std::int64_t blocks, AdamW8bitBody<P> body) {
  constexpr int kTeam = AdamW8bitBody<P>::kTeam;
  float g_scale = body.rates.scale;
  if (body.factor != nullptr) {
    const float clip = *body.factor;
    if (clip != clip) return;
    g_scale *= clip;
  }
  const std::int64_t teams = static_cast<std::int64_t>(gridDim.x) * blockDim.x / kTeam;
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kTeam;
  // Both teams of a warp make as many turns.
  const std::int64_t even = (blocks + 1) / 2 * 2;
  for (std::int64_t block = first; block < even; block += teams)
    body.update(block, static_cast<int>(threadIdx.x % kTeam), g_scale);
}

template <typename P>
void run_8bit(Context& context, const AdamW8bit& args) {
  const AdamW& step = args.step;
  AdamW8bitBody<P> body{.param = static_cast<P*>(step.param.data),
                        .grad = static_cast<const float*>(step.grad.data),
                        .exp_avg = static_cast<signed char*>(step.exp_avg.data),
                        .exp_avg_sq = static_cast<unsigned char*>(step.exp_avg_sq.data),
                        .exp_avg_scale = static_cast<float*>(args.exp_avg_scale.data),
                        .exp_avg_sq_scale = static_cast<float*>(args.exp_avg_sq_scale.data),
                        .copy = static_cast<BFloat16*>(step.copy.data),
                        .factor = static_cast<const float*>(step.factor.data),
                        .rates = step.rates,
                        .rng = step.stochastic ? step.rng : nullptr,
                        .step = static_cast<std::uint64_t>(step.step),
                        .cautious = step.decay == Decay::Shrinking,
                        .range = {},
                        .key = 0};
  for (const AdamWRange& range : step.ranges) {
    body.range = range;
    body.key = moment_key(range.place, step.step);
    const std::int64_t blocks = (range.end - range.begin + kMomentBlock - 1) / kMomentBlock;
    launch(context, "adamw_8bit", adamw_8bit_kernel<P>,
           LaunchShape{ElementwiseShape::blocks(blocks * AdamW8bitBody<P>::kTeam, 1),
                       ElementwiseShape::kThreads},
           blocks, body);
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

template <typename P>
struct AverageBody {
  const P* param;
  float* average;
  const float* factor;
  float rest;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    if (*factor != *factor) return;
    const Pack<P, N> weights = load_pack<N>(param + i);
    Pack<float, N> averages = load_pack<N>(average + i);
    for (int k = 0; k < N; ++k) averages[k] += rest * (widen(weights[k]) - averages[k]);
    store_pack<N>(average + i, averages);
  }
};

template <typename P>
void run_average(Context& context, const MovingAverage& args) {
  const AverageBody<P> body{.param = static_cast<const P*>(args.param.data),
                            .average = static_cast<float*>(args.average.data),
                            .factor = static_cast<const float*>(args.factor.data),
                            .rest = static_cast<float>(1.0 - args.decay)};
  launch_elementwise<kPack<float>>(context, "moving_average", args.param.numel(),
                                   is_aligned(body.param, body.average), body);
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

void adamw_8bit(Context& context, const AdamW8bit& args) {
  if (args.step.param.dtype == DType::BF16)
    run_8bit<BFloat16>(context, args);
  else
    run_8bit<float>(context, args);
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

void moving_average(Context& context, const MovingAverage& args) {
  if (args.param.dtype == DType::BF16)
    run_average<BFloat16>(context, args);
  else
    run_average<float>(context, args);
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
TESSERA_CUDA_KERNEL(adamw_8bit, AdamW8bit)
TESSERA_CUDA_KERNEL(muon_momentum, MuonMomentum)
TESSERA_CUDA_KERNEL(moving_average, MovingAverage)
TESSERA_CUDA_KERNEL(normalize, Normalize)
TESSERA_CUDA_KERNEL(weight_update, WeightUpdate)
TESSERA_CUDA_KERNEL(sum_of_squares, SumOfSquares)
TESSERA_CUDA_KERNEL(clip_factor, ClipFactor)

}  // namespace tessera::kernels::cuda
