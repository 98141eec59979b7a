#include "kernels/cross_entropy.h"

#include <cmath>
#include <limits>

#include "core/base/context.h"
#include "core/base/thread_pool.h"
#include "kernels/cpu/vector.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

/// e^x for x <= 0 or NaN; for f32 at least 1e-38. Infinity gives NaN, or for f64 infinity.
inline float exp_below(float x) { return exp_in_range(x < -87.0F ? -87.0F : x); }
inline double exp_below(double x) { return exp_in_range(x); }
inline Vector<float> exp_below(Vector<float> x) {
  return exp_in_range(larger<float>(Vector<float>{} - 87.0F, x));
}
inline Vector<double> exp_below(Vector<double> x) { return exp_in_range(x); }

/// Cross-entropy of a row of logits of type T, computed in A. For the loss the row is read once, in
/// blocks that stay in the first-level cache for two loops: the maximum so far, then exponentials
/// relative to it and their sum. Computing the exponentials takes about as long as reading a block,
/// so that loop also prefetches, if there is no cap, which takes longer.
/// @tparam kReplaces  the loss overwrites logits by what the gradient needs: exponentials, or capped
///   logits. Only where T is as precise as A, and the gradient follows
template <bool kCapped, bool kReplaces, typename T, typename A>
class Row {
 public:
  Row(T* logits, std::int64_t vocabulary, A cap)
      : logits_(logits),
        vocabulary_(vocabulary),
        block_(kPrecise && !kCapped ? std::max(kBlock, whole_steps(vocabulary / kMostBlocks + 1))
                                    : kBlock),
        cap_(cap),
        inverse_cap_(kCapped ? A(1) / cap : A(0)) {}

  A loss(std::int32_t target) {
    const A target_logit = capped(load(logits_ + target));
    A last = std::numeric_limits<A>::lowest();
    for_blocks([&](T* x, std::int64_t n, std::int64_t block) {
      // The reference is finite, also after logits of -inf alone.
      A reference = 0, sum = 0;
      if constexpr (kCapped) {
        A buffer[kReplaces ? 1 : kBlock];
        A* c = buffer;
        if constexpr (kReplaces) c = x;
        max_ = maximum(x, n, c);
        reference = std::max(max_, last);
        sum = exponentials<false>(c, n, reference);
      } else {
        max_ = maximum(x, n, nullptr);
        reference = std::max(max_, last);
        sum = exponentials<kReplaces>(x, n, reference);
      }
      sum_ = sum_ * exp_below(last - reference) + sum;
      if constexpr (kRescales) references_[block] = reference;
      last = reference;
    });
    return std::log(sum_) + (max_ - target_logit);
  }

  /// Replaces the row by grad_scale * d loss / d logits, after loss().
  void write_gradient(std::int32_t target, A grad_scale) {
    const A scale = grad_scale / sum_;
    T* const hit = logits_ + target;
    if constexpr (kRescales) {
      for_blocks([&](T* x, std::int64_t n, std::int64_t block) {
        const A factor = scale * exp_below(references_[block] - max_);
#pragma omp simd
        for (std::int64_t i = 0; i < n; ++i) store(x + i, load(x + i) * factor);
      });
      store(hit, load(hit) - grad_scale);
    } else {
      const A at_target = gradient(load(hit), scale, grad_scale);
      std::int64_t i = 0;
      for (; i + kWidth <= vocabulary_; i += kWidth)
        store_vector(logits_ + i, gradient(load_vector<A>(logits_ + i), scale, A(0)));
      for (; i < vocabulary_; ++i) store(logits_ + i, gradient(load(logits_ + i), scale, A(0)));
      store(hit, at_target);
    }
  }

 private:
  static constexpr int kWidth = kLanes<A>, kUnrolled = 2, kStep = kUnrolled * kWidth;
  static constexpr std::int64_t kBlock = 1024, kMostBlocks = 64, kAhead = 2048;  // elements
  static constexpr bool kPrecise = std::is_same_v<T, A>;
  static constexpr bool kRescales = kReplaces && !kCapped;  ///< exponentials, by references_

  static std::int64_t whole_steps(std::int64_t n) { return (n + kStep - 1) / kStep * kStep; }

  /// Calls body(first, count, number of the block); every block but the last is whole steps long.
  template <typename Body>
  void for_blocks(const Body& body) const {
    for (std::int64_t begin = 0, block = 0; begin < vocabulary_; begin += block_, ++block)
      body(logits_ + begin, std::min(block_, vocabulary_ - begin), block);
  }

  template <typename V>
  V capped(V logit) const {
    if constexpr (kCapped) return cap_ * tanh(logit * inverse_cap_);
    return logit;
  }

  /// Maximum of max_ and n capped logits that aren't NaN.
  /// @param capped_logits  receives them, if kCapped; may be x
  A maximum(const T* x, std::int64_t n, A* capped_logits) const {
    Vector<A> parts = Vector<A>{} + max_;
    std::int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      const Vector<A> c = capped(load_vector<A>(x + i));
      if constexpr (kCapped) store_vector<A>(capped_logits + i, c);
      parts = larger<A>(c, parts);
    }
    A result = horizontal_max<A>(parts);
    for (; i < n; ++i) {
      const A c = capped(load(x + i));
      if constexpr (kCapped) capped_logits[i] = c;
      result = std::max(result, c);
    }
    return result;
  }

  /// Sum of e^(c - reference) over n numbers, which the terms replace if kStore.
  template <bool kStore, typename C>
  A exponentials(C* c, std::int64_t n, A reference) const {
    Vector<A> parts[kUnrolled]{};
    std::int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      if constexpr (!kCapped)
        for (int line = 0; line < kStep; line += 64 / static_cast<int>(sizeof(C)))
          __builtin_prefetch(c + i + kAhead + line, 0, 2);
#pragma GCC unroll 2
      for (int u = 0; u < kUnrolled; ++u) {
        C* const at = c + i + u * kWidth;
        const Vector<A> e = exp_below(load_vector<A>(at) - reference);
        if constexpr (kStore) store_vector<A>(at, e);
        parts[u] += e;
      }
    }
    A sum = horizontal_sum<A>(parts[0] + parts[1]);
    for (; i < n; ++i) {
      const A e = exp_below(load(c + i) - reference);
      if constexpr (kStore) store(c + i, e);
      sum += e;
    }
    return sum;
  }

  /// scale * e^(c - max) - hit, times dc / d logit, where c is the capped logit.
  template <typename V>
  V gradient(V logit, A scale, A hit) const {
    const V c = kReplaces ? logit : capped(logit), g = exp_below(c - max_) * scale - hit;
    return kCapped ? g * (A(1) - c * inverse_cap_ * (c * inverse_cap_)) : g;
  }

  T* logits_;
  std::int64_t vocabulary_, block_;
  A cap_, inverse_cap_;
  A max_ = -std::numeric_limits<A>::infinity(), sum_ = 0;
  A references_[kRescales ? kMostBlocks : 1];
};

template <bool kCapped, typename T, typename A>
A cross_entropy_row(T* logits, std::int64_t vocabulary, std::int32_t target, bool write_gradient,
                    A grad_scale, A cap) {
  if (target == kIgnoreTarget) {
    if (write_gradient)
      for (std::int64_t i = 0; i < vocabulary; ++i) store(logits + i, A(0));
    return 0;
  }
  if (!write_gradient) return Row<kCapped, false, T, A>(logits, vocabulary, cap).loss(target);
  Row<kCapped, std::is_same_v<T, A>, T, A> row(logits, vocabulary, cap);
  const A loss = row.loss(target);
  row.write_gradient(target, grad_scale);
  return loss;
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
