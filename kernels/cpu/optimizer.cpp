#include "kernels/cpu/optimizer.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/level.h"
#include "kernels/optimizer.h"

TESSERA_CPU_BEGIN

void adamw(Context& context, const AdamW& args) {
  auto* param = static_cast<float*>(args.param.data);
  const auto* grad = static_cast<const float*>(args.grad.data);
  auto* exp_avg = static_cast<float*>(args.exp_avg.data);
  auto* exp_avg_sq = static_cast<float*>(args.exp_avg_sq.data);
  // What does not change within the step is worked out once, in double.
  const auto step = static_cast<double>(args.step);
  const auto scale = static_cast<float>(args.grad_scale);
  const auto beta1 = static_cast<float>(args.beta1);
  const auto beta2 = static_cast<float>(args.beta2);
  const auto one_minus_beta1 = static_cast<float>(1.0 - args.beta1);
  const auto one_minus_beta2 = static_cast<float>(1.0 - args.beta2);
  const auto decay = static_cast<float>(1.0 - args.lr * args.weight_decay);
  const auto rate = static_cast<float>(args.lr / (1.0 - std::pow(args.beta1, step)));
  const auto v_scale = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(args.beta2, step)));
  const auto eps = static_cast<float>(args.eps);
  context.threads().parallel_for(
      args.param.numel(), 4096, [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
        for (std::int64_t i = begin; i < end; ++i) {
          const float g = scale * grad[i];
          const float m = beta1 * exp_avg[i] + one_minus_beta1 * g;
          const float v = beta2 * exp_avg_sq[i] + one_minus_beta2 * g * g;
          exp_avg[i] = m;
          exp_avg_sq[i] = v;
          param[i] = param[i] * decay - rate * m / (std::sqrt(v) * v_scale + eps);
        }
      });
}

void sum_of_squares(Context& context, const SumOfSquares& args) {
  const std::int64_t blocks = (args.n + kSumBlock - 1) / kSumBlock;
  context.threads().parallel_for(blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const float* x = args.x + block * kSumBlock;
      const std::int64_t n = std::min(kSumBlock, args.n - block * kSumBlock);
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = 0; i < n; ++i) {
        const auto value = static_cast<double>(x[i]);
        sum += value * value;
      }
      args.partials[block] = sum;
    }
  });
}

TESSERA_CPU_END
