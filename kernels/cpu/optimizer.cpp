#include "kernels/optimizer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/base/thread_pool.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/workspace.h"

TESSERA_CPU_BEGIN

namespace {

// Updates the moments of a weight and returns its new value.
inline float updated(const AdamWRates& r, const AdamWRange& range, float param, float grad,
                     float& exp_avg, float& exp_avg_sq) {
  const float g = r.scale * grad;
  const float m = r.beta1 * exp_avg + r.one_minus_beta1 * g;
  const float v = r.beta2 * exp_avg_sq + r.one_minus_beta2 * g * g;
  exp_avg = m;
  exp_avg_sq = v;
  return param * range.decay - range.rate * m / (std::sqrt(v) * r.v_scale + r.eps);
}

// Rounds away from zero with a probability equal to the discarded fraction.
BFloat16 round_stochastically(float value, std::uint32_t random) {
  if (!std::isfinite(value)) return BFloat16(value);
  const auto bits = std::bit_cast<std::uint32_t>(value) + (random & 0xffffU);
  BFloat16 result;
  result.bits = static_cast<std::uint16_t>(bits >> 16);
  return result;
}

template <typename P, bool kCopy>
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
        std::array<std::uint32_t, 4> words{};
        for (std::int64_t i = begin; i < end; ++i) {
          const std::uint64_t at = range.first_element + static_cast<std::uint64_t>(i);
          if (i == begin || at % 4 == 0) words = rounding.words(at / 4);
          param[i] = round_stochastically(
              updated(r, range, load(param + i), grad[i], exp_avg[i], exp_avg_sq[i]),
              words[at % 4]);
        }
      }
      return;
    }
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      const float value = updated(r, range, load(param + i), grad[i], exp_avg[i], exp_avg_sq[i]);
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
    if (args.param.dtype == DType::BF16)
      run<BFloat16, false>(context, args, rates, range);
    else if (args.copy.data != nullptr)
      run<float, true>(context, args, rates, range);
    else
      run<float, false>(context, args, rates, range);
  }
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
