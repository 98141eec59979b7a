#include "kernels/cross_entropy.h"

#include <cmath>
#include <limits>

#include "core/base/context.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

// One row stays in the nearest cache for its three passes: maximum, exponentials and their sum,
// gradient.
template <typename T>
T cross_entropy_row(T* logits, std::int64_t vocabulary, std::int32_t target, bool write_gradient,
                    T grad_scale) {
  if (target == kIgnoreTarget) {
    if (write_gradient)
      for (std::int64_t i = 0; i < vocabulary; ++i) logits[i] = 0;
    return 0;
  }
  T max = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : max)
  for (std::int64_t i = 0; i < vocabulary; ++i) max = logits[i] > max ? logits[i] : max;
  const T target_logit = logits[target];
  T sum = 0;
  if (write_gradient) {
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < vocabulary; ++i) {
      const T e = exp(logits[i] - max);
      logits[i] = e;
      sum += e;
    }
    const T factor = grad_scale / sum;
#pragma omp simd
    for (std::int64_t i = 0; i < vocabulary; ++i) logits[i] *= factor;
    logits[target] -= grad_scale;
  } else {
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < vocabulary; ++i) sum += exp(logits[i] - max);
  }
  return std::log(sum) + (max - target_logit);
}

// As above, at the price of computing exponentials twice: they can't stay in a bf16 row.
float cross_entropy_row(BFloat16* logits, std::int64_t vocabulary, std::int32_t target,
                        bool write_gradient, float grad_scale) {
  if (target == kIgnoreTarget) {
    if (write_gradient)
      for (std::int64_t i = 0; i < vocabulary; ++i) store(logits + i, 0.0F);
    return 0;
  }
  float max = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : max)
  for (std::int64_t i = 0; i < vocabulary; ++i) {
    const float logit = load(logits + i);
    max = logit > max ? logit : max;
  }
  const float target_logit = load(logits + target);
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < vocabulary; ++i) sum += exp(load(logits + i) - max);
  if (write_gradient) {
    const float factor = grad_scale / sum;
#pragma omp simd
    for (std::int64_t i = 0; i < vocabulary; ++i)
      store(logits + i, exp(load(logits + i) - max) * factor);
    store(logits + target, std::exp(target_logit - max) * factor - grad_scale);
  }
  return std::log(sum) + (max - target_logit);
}

}  // namespace

void cross_entropy(Context& context, const CrossEntropy& args) {
  const std::int64_t vocabulary = args.logits.shape[1];
  const std::int64_t stride = args.logits.strides[0];
  const auto* targets = static_cast<const std::int32_t*>(args.targets.data);
  const std::int64_t grain = 1 + 4096 / vocabulary;
  visit_dtype(args.logits.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulator<T>;
    auto* logits = static_cast<T*>(args.logits.data);
    auto* losses = static_cast<A*>(args.losses.data);
    context.threads().parallel_for(
        args.logits.shape[0], grain, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t row = begin; row < end; ++row)
            losses[row] = cross_entropy_row(logits + row * stride, vocabulary, targets[row],
                                            args.write_gradient, static_cast<A>(args.grad_scale));
        });
  });
}

TESSERA_CPU_END
