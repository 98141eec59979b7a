#include "kernels/cross_entropy.h"

#include <cmath>
#include <limits>

#include "core/base/context.h"
#include "core/base/thread_pool.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

// A row stays in the cache for three passes: maximum, exponentials and their sum, gradient. The
// first pass stores capped logits, the second one otherwise exponentials. A bf16 row can't hold them
// precisely, so they are computed again.
template <bool kCapped, typename T, typename A>
A cross_entropy_row(T* logits, std::int64_t vocabulary, std::int32_t target, bool write_gradient,
                    A grad_scale, A cap) {
  constexpr bool kPrecise = std::is_same_v<T, A>, kKeeps = kPrecise && !kCapped;
  if (target == kIgnoreTarget) {
    if (write_gradient)
      for (std::int64_t i = 0; i < vocabulary; ++i) store(logits + i, A(0));
    return 0;
  }
  const A inverse_cap = kCapped ? A(1) / cap : A(0);
  const auto capped = [=](A logit) { return kCapped ? cap * tanh(logit * inverse_cap) : logit; };
  const bool store_capped = kCapped && kPrecise && write_gradient;
  A max = -std::numeric_limits<A>::infinity();
  if (store_capped) {
#pragma omp simd
    for (std::int64_t i = 0; i < vocabulary; ++i) store(logits + i, capped(load(logits + i)));
  }
  const auto at = [=](std::int64_t i) {
    return store_capped ? load(logits + i) : capped(load(logits + i));
  };
#pragma omp simd reduction(max : max)
  for (std::int64_t i = 0; i < vocabulary; ++i) {
    const A logit = at(i);
    max = logit > max ? logit : max;
  }
  const A target_logit = at(target);
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
    for (std::int64_t i = 0; i < vocabulary; ++i) sum += exp(at(i) - max);
  }
  if (write_gradient) {
    const A factor = grad_scale / sum;
    const auto slope = [=](A c) { return A(1) - c * inverse_cap * (c * inverse_cap); };
#pragma omp simd
    for (std::int64_t i = 0; i < vocabulary; ++i) {
      if constexpr (kKeeps) {
        store(logits + i, load(logits + i) * factor);
      } else {
        const A c = at(i);
        A gradient = exp(c - max) * factor;
        if constexpr (kCapped) gradient *= slope(c);
        store(logits + i, gradient);
      }
    }
    if constexpr (kKeeps) {
      store(logits + target, load(logits + target) - grad_scale);
    } else {
      const A gradient = std::exp(target_logit - max) * factor - grad_scale;
      store(logits + target, kCapped ? gradient * slope(target_logit) : gradient);
    }
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
    const auto row_of =
        args.softcap > 0.0 ? cross_entropy_row<true, T, A> : cross_entropy_row<false, T, A>;
    context.threads().parallel_for(
        args.logits.shape[0], grain, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t row = begin; row < end; ++row)
            losses[row] =
                row_of(logits + row * stride, vocabulary, targets[row], args.write_gradient,
                       static_cast<A>(args.grad_scale), static_cast<A>(args.softcap));
        });
  });
}

TESSERA_CPU_END
