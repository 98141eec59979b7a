#include "kernels/cross_entropy.h"

#include <cmath>
#include <limits>

#include "core/base/context.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

// A row stays in the cache for three passes: maximum, exponentials and their sum, gradient. A bf16
// row can't hold the exponentials precisely, so they are computed twice.
template <typename T, typename A>
A cross_entropy_row(T* logits, std::int64_t vocabulary, std::int32_t target, bool write_gradient,
                    A grad_scale) {
  constexpr bool kKeeps = std::is_same_v<T, A>;
  if (target == kIgnoreTarget) {
    if (write_gradient)
      for (std::int64_t i = 0; i < vocabulary; ++i) store(logits + i, A(0));
    return 0;
  }
  A max = -std::numeric_limits<A>::infinity();
#pragma omp simd reduction(max : max)
  for (std::int64_t i = 0; i < vocabulary; ++i) {
    const A logit = load(logits + i);
    max = logit > max ? logit : max;
  }
  const A target_logit = load(logits + target);
  A sum = 0;
  if (kKeeps && write_gradient) {
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < vocabulary; ++i) {
      const A e = exp(load(logits + i) - max);
      store(logits + i, e);
      sum += e;
    }
  } else {
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < vocabulary; ++i) sum += exp(load(logits + i) - max);
  }
  if (write_gradient) {
    const A factor = grad_scale / sum;
#pragma omp simd
    for (std::int64_t i = 0; i < vocabulary; ++i) {
      A e = load(logits + i);
      if constexpr (!kKeeps) e = exp(e - max);
      store(logits + i, e * factor);
    }
    if constexpr (kKeeps)
      store(logits + target, load(logits + target) - grad_scale);
    else
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
