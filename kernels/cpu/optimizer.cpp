#include "kernels/optimizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/base/thread_pool.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/random.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/moment_code.h"
#include "kernels/workspace.h"

TESSERA_CPU_BEGIN

namespace {

/// 1 - lr wd, or 1 for a weight that does not decay.
template <bool kCautious>
float decay_of(float decay, float update, float param) {
  return kCautious && update * param < 0 ? 1.0F : decay;
}

// Updates the moments of a weight and returns its new value.
template <bool kCautious>
float updated(const AdamWRates& r, const AdamWRange& range, float param, float grad, float& exp_avg,
              float& exp_avg_sq) {
  const float g = r.scale * grad;
  const float m = r.beta1 * exp_avg + r.one_minus_beta1 * g;
  const float v = r.beta2 * exp_avg_sq + r.one_minus_beta2 * g * g;
  exp_avg = m;
  exp_avg_sq = v;
  return param * decay_of<kCautious>(range.decay, m, param) -
         range.rate * m / (std::sqrt(v) * r.v_scale + r.eps);
}

/// Rounds away from zero with a probability equal to the discarded fraction; infinities and NaNs as
/// store() does.
inline void store_stochastically(BFloat16* p, float value, std::uint32_t random) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool finite = (bits & 0x7f800000U) != 0x7f800000U;
  BFloat16 nearest;
  store(&nearest, value);
  p->bits = finite ? static_cast<std::uint16_t>((bits + (random & 0xffffU)) >> 16) : nearest.bits;
}

template <typename P, bool kCopy, bool kCautious>
void run(Context& context, const AdamW& args, const AdamWRates& r, const AdamWRange& range) {
  RngKey rounding;
  if (args.stochastic) {
    rounding = RngKey::make(args.rng->seed, RngPurpose::Rounding,
                            static_cast<std::uint64_t>(args.step), range.place);
  }
  auto* param = static_cast<P*>(args.param.data) + range.begin;
  const auto* grad = static_cast<const float*>(args.grad.data) + range.begin;
  auto* exp_avg = static_cast<float*>(args.exp_avg.data) + range.begin;
  auto* exp_avg_sq = static_cast<float*>(args.exp_avg_sq.data) + range.begin;
  auto* copy = kCopy ? static_cast<BFloat16*>(args.copy.data) + range.begin : nullptr;
  const auto body = [=, &args](std::int64_t begin, std::int64_t end) {
    if (args.stochastic) {
      if constexpr (std::is_same_v<P, BFloat16>) {
        for_random_words(rounding, range.first_element, begin, end,
                         [=](std::int64_t first, std::int64_t count, const std::uint32_t* words) {
#pragma omp simd
                           for (std::int64_t j = 0; j < count; ++j) {
                             const std::int64_t i = first + j;
                             store_stochastically(
                                 param + i,
                                 updated<kCautious>(r, range, load(param + i), grad[i], exp_avg[i],
                                                    exp_avg_sq[i]),
                                 words[j]);
                           }
                         });
      }
      return;
    }
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      const float value =
          updated<kCautious>(r, range, load(param + i), grad[i], exp_avg[i], exp_avg_sq[i]);
      store(param + i, value);
      if constexpr (kCopy) store(copy + i, value);
    }
  };
  for_elements(context, range.end - range.begin, body);
}

}  // namespace

void adamw(Context& context, const AdamW& args) {
  const float factor =
      args.factor.data != nullptr ? *static_cast<const float*>(args.factor.data) : 1.0F;
  if (std::isnan(factor)) return;
  AdamWRates rates = args.rates;
  rates.scale *= factor;
  for (const AdamWRange& range : args.ranges) {
    visit_flag(args.decay == Decay::Shrinking, [&](auto cautious) {
      constexpr bool kCautious = decltype(cautious)::value;
      if (args.param.dtype == DType::BF16)
        run<BFloat16, false, kCautious>(context, args, rates, range);
      else if (args.copy.data != nullptr)
        run<float, true, kCautious>(context, args, rates, range);
      else
        run<float, false, kCautious>(context, args, rates, range);
    });
  }
}

namespace {

// Blocks of a range; the last may be shorter.
template <typename P, bool kCautious>
void run_blocks(Context& context, const AdamW8bit& args, const AdamWRates& r,
                const AdamWRange& range) {
  const AdamW& step = args.step;
  RngKey rounding;
  if (step.stochastic)
    rounding = RngKey::make(step.rng->seed, RngPurpose::Rounding,
                            static_cast<std::uint64_t>(step.step), range.place);
  const std::uint32_t key = moment_key(range.place, step.step);
  const std::int64_t length = range.end - range.begin;
  const auto body = [=, &args, &range](std::int64_t first, std::int64_t last) {
    for (std::int64_t block = first; block < last; ++block) {
      const std::int64_t offset = block * kMomentBlock, at = range.begin + offset;
      const auto n = static_cast<int>(std::min(kMomentBlock, length - offset));
      auto* const param = static_cast<P*>(args.step.param.data) + at;
      const auto* const grad = static_cast<const float*>(args.step.grad.data) + at;
      auto* const m_code = static_cast<std::int8_t*>(args.step.exp_avg.data) + at;
      auto* const v_code = static_cast<std::uint8_t*>(args.step.exp_avg_sq.data) + at;
      auto* const m_scale = static_cast<float*>(args.exp_avg_scale.data) + at / kMomentBlock;
      auto* const v_scale = static_cast<float*>(args.exp_avg_sq_scale.data) + at / kMomentBlock;
      auto* const copy = static_cast<BFloat16*>(args.step.copy.data);
      float m[kMomentBlock], v[kMomentBlock], value[kMomentBlock];
      float m_most = 0, v_most = 0;
#pragma omp simd reduction(max : m_most, v_most)
      for (int i = 0; i < n; ++i) {
        m[i] = *m_scale * decode_first(m_code[i]);
        v[i] = *v_scale * decode_second(v_code[i]);
        value[i] = updated<kCautious>(r, range, load(param + i), grad[i], m[i], v[i]);
        m_most = std::max(m_most, std::abs(m[i]));
        v_most = std::max(v_most, v[i]);
      }
      *m_scale = moment_scale(m_most);
      *v_scale = moment_scale(v_most);
      const float m_part = moment_part(m_most);
      const float v_part = moment_part(v_most);
      const auto element =
          static_cast<std::uint32_t>(range.first_element) + static_cast<std::uint32_t>(offset);
#pragma omp simd
      for (int i = 0; i < n; ++i) {
        const std::uint32_t bits = mixed(key ^ (element + static_cast<std::uint32_t>(i)));
        const float x = m[i] * m_part, y = v[i] * v_part;
        m_code[i] =
            static_cast<std::int8_t>(encode_first(x, std::sqrt(std::abs(x)), first_random(bits)));
        v_code[i] = static_cast<std::uint8_t>(
            encode_second(y, std::sqrt(std::sqrt(y)), second_random(bits)));
      }
      if constexpr (std::is_same_v<P, BFloat16>) {
        if (args.step.stochastic) {
          for_random_words(rounding, range.first_element + static_cast<std::uint64_t>(offset), 0, n,
                           [&](std::int64_t part, std::int64_t count, const std::uint32_t* words) {
#pragma omp simd
                             for (std::int64_t j = 0; j < count; ++j)
                               store_stochastically(param + part + j, value[part + j], words[j]);
                           });
          continue;
        }
      }
#pragma omp simd
      for (int i = 0; i < n; ++i) store(param + i, value[i]);
      if (copy != nullptr) {
#pragma omp simd
        for (int i = 0; i < n; ++i) store(copy + at + i, value[i]);
      }
    }
  };
  context.threads().parallel_for((length + kMomentBlock - 1) / kMomentBlock,
                                 kSerialElements / kMomentBlock, body);
}

template <typename Out>
void momentum(Context& context, const MuonMomentum& args, float factor) {
  const auto* grad = static_cast<const float*>(args.grad.data);
  auto* momentum = static_cast<float*>(args.momentum.data);
  auto* out = static_cast<Out*>(args.out.data);
  const auto beta = static_cast<float>(args.beta), rest = static_cast<float>(1.0 - args.beta);
  for_elements(context, args.grad.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      const float g = rest * (factor * grad[i]);
      momentum[i] = beta * momentum[i] + g;
      store(out + i, beta * momentum[i] + g);
    }
  });
}

template <typename Out>
void scale(Context& context, const Normalize& args, float factor) {
  const auto* x = static_cast<const float*>(args.x.data);
  auto* out = static_cast<Out*>(args.out.data);
  for_elements(context, args.x.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) store(out + i, factor * x[i]);
  });
}

template <typename P, typename U, bool kCautious>
void update(Context& context, const WeightUpdate& args) {
  auto* param = static_cast<P*>(args.param.data);
  const auto* update = static_cast<const U*>(args.update.data);
  auto* copy = static_cast<BFloat16*>(args.copy.data);
  const auto decay = static_cast<float>(1.0 - args.lr * args.weight_decay);
  const auto rate = static_cast<float>(args.rate);
  RngKey rounding;
  if (args.stochastic)
    rounding = RngKey::make(args.rng->seed, RngPurpose::Rounding,
                            static_cast<std::uint64_t>(args.step), args.place);
  for_elements(context, args.param.numel(), [=, &args](std::int64_t begin, std::int64_t end) {
    const auto value = [&](std::int64_t i) {
      const float old = load(param + i), u = load(update + i);
      return old * decay_of<kCautious>(decay, u, old) - rate * u;
    };
    if (args.stochastic) {
      if constexpr (std::is_same_v<P, BFloat16>)
        for_random_words(rounding, args.first_element, begin, end,
                         [&](std::int64_t first, std::int64_t count, const std::uint32_t* words) {
#pragma omp simd
                           for (std::int64_t j = 0; j < count; ++j)
                             store_stochastically(param + first + j, value(first + j), words[j]);
                         });
      return;
    }
    if (copy != nullptr) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) store(copy + i, value(i));
    }
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) store(param + i, value(i));
  });
}

template <typename P, typename U>
void update(Context& context, const WeightUpdate& args) {
  visit_flag(args.decay == Decay::Shrinking,
             [&](auto cautious) { update<P, U, decltype(cautious)::value>(context, args); });
}

template <typename P>
void average(Context& context, const MovingAverage& args) {
  const auto* param = static_cast<const P*>(args.param.data);
  auto* average = static_cast<float*>(args.average.data);
  const auto rest = static_cast<float>(1.0 - args.decay);
  for_elements(context, args.param.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) average[i] += rest * (load(param + i) - average[i]);
  });
}

}  // namespace

void adamw_8bit(Context& context, const AdamW8bit& args) {
  const AdamW& step = args.step;
  const float factor =
      step.factor.data != nullptr ? *static_cast<const float*>(step.factor.data) : 1.0F;
  if (std::isnan(factor)) return;
  AdamWRates rates = step.rates;
  rates.scale *= factor;
  for (const AdamWRange& range : step.ranges)
    visit_flag(step.decay == Decay::Shrinking, [&](auto cautious) {
      constexpr bool kCautious = decltype(cautious)::value;
      if (step.param.dtype == DType::BF16)
        run_blocks<BFloat16, kCautious>(context, args, rates, range);
      else
        run_blocks<float, kCautious>(context, args, rates, range);
    });
}

void muon_momentum(Context& context, const MuonMomentum& args) {
  const float factor = *static_cast<const float*>(args.factor.data);
  if (std::isnan(factor)) return;
  if (args.out.dtype == DType::BF16)
    momentum<BFloat16>(context, args, factor);
  else
    momentum<float>(context, args, factor);
}

void normalize(Context& context, const Normalize& args) {
  const double norm = std::sqrt(*static_cast<const double*>(args.sum.data));
  const auto factor = static_cast<float>(1.0 / std::max(norm, 1e-7));
  if (args.out.dtype == DType::BF16)
    scale<BFloat16>(context, args, factor);
  else
    scale<float>(context, args, factor);
}

void weight_update(Context& context, const WeightUpdate& args) {
  if (std::isnan(*static_cast<const float*>(args.factor.data))) return;
  const bool is_half = args.param.dtype == DType::BF16;
  if (args.update.dtype == DType::BF16)
    is_half ? update<BFloat16, BFloat16>(context, args) : update<float, BFloat16>(context, args);
  else
    is_half ? update<BFloat16, float>(context, args) : update<float, float>(context, args);
}

void moving_average(Context& context, const MovingAverage& args) {
  if (std::isnan(*static_cast<const float*>(args.factor.data))) return;
  if (args.param.dtype == DType::BF16)
    average<BFloat16>(context, args);
  else
    average<float>(context, args);
}

void clip_factor(Context&, const ClipFactor& args) {
  const auto* totals = static_cast<const double*>(args.totals.data);
  bool finite = true;
  for (std::int64_t i = 0; i < args.totals.numel(); ++i) finite &= std::isfinite(totals[i]);
  double factor = 1;
  if (args.max_norm > 0) factor = std::min(1.0, args.max_norm / (std::sqrt(totals[0]) + 1e-6));
  *static_cast<float*>(args.factor.data) =
      finite ? static_cast<float>(factor) : std::numeric_limits<float>::quiet_NaN();
}

// Sums blocks of fixed length, so that the result does not depend on the number of threads.
void sum_of_squares(Context& context, const SumOfSquares& args) {
  constexpr std::int64_t kBlock = 16384;
  const auto* data = static_cast<const float*>(args.x.data);
  const std::int64_t count = args.x.numel();
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  const Workspace workspace(context, static_cast<std::size_t>(blocks) * sizeof(double),
                            "sum_of_squares");
  if (workspace.is_planned()) return;
  auto* partials = static_cast<double*>(workspace.data());
  context.threads().parallel_for(blocks, 1, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const float* x = data + block * kBlock;
      const std::int64_t n = std::min(kBlock, count - block * kBlock);
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = 0; i < n; ++i) {
        const auto value = static_cast<double>(x[i]);
        sum += value * value;
      }
      partials[block] = sum;
    }
  });
  double sum = 0;
  for (std::int64_t i = 0; i < blocks; ++i) sum += partials[i];
  *static_cast<double*>(args.sum.data) = sum;
}

TESSERA_CPU_END
