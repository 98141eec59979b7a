#include "kernels/optimizer.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/level.h"
#include "kernels/workspace.h"

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

// Blocks of fixed length, whatever the number of threads, each in one float64.
void sum_of_squares(Context& context, const SumOfSquares& args) {
  constexpr std::int64_t kBlock = 16384;
  const auto* data = static_cast<const float*>(args.x.data);
  const std::int64_t count = args.x.numel();
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  const Workspace workspace(context, static_cast<std::size_t>(blocks) * sizeof(double),
                            "sum_of_squares");
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
