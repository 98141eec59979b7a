#include "kernels/cross_entropy.h"

#include <cmath>
#include <limits>

#include "core/base/context.h"
#include "core/base/thread_pool.h"
#include "kernels/cpu/vector.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

/// e^x for x <= 0 or NaN; for f32 at least 1e-38.
inline float exp_below(float x) { return exp_in_range(x < -87.0F ? -87.0F : x); }
inline double exp_below(double x) { return exp_in_range(x); }
inline Vector<float> exp_below(Vector<float> x) {
  return exp_in_range(larger<float>(Vector<float>{} - 87.0F, x));
}
inline Vector<double> exp_below(Vector<double> x) { return exp_in_range(x); }

/// Cross-entropy of a row of logits of type T, computed in A. The row is read from memory once, in
/// blocks that stay in the first-level cache for two loops: the maximum so far, then exponentials
/// relative to it and their sum. Computing the exponentials takes about as long as reading a block,
/// so that loop also prefetches.
template <bool kCapped, typename T, typename A>
class Row {
 public:
  Row(T* logits, std::int64_t vocabulary, A cap)
      : logits_(logits),
        vocabulary_(vocabulary),
        block_(std::max(kBlock, (vocabulary / kMostBlocks / kStep + 1) * kStep)),
        cap_(cap),
        inverse_cap_(kCapped ? A(1) / cap : A(0)) {}

  /// Returns the loss. If write_gradient() follows, logits as precise as A are replaced by what it
  /// needs of them: exponentials, or capped logits.
  template <bool kReplace>
  A loss(std::int32_t target) {
    const A target_logit = capped(load(logits_ + target));
    A last = std::numeric_limits<A>::lowest();
    for_blocks([&](T* x, std::int64_t n, std::int64_t block) {
      max_ = maximum < kReplace && kCapped > (x, n);
      const A reference = std::max(max_, last);  // finite, also after logits of -inf alone
      const A sum = exponentials<kReplace>(x, n, reference);
      sum_ = sum_ * exp_below(last - reference) + sum;
      references_[block] = last = reference;
    });
    return std::log(sum_) + (max_ - target_logit);
  }

  /// Replaces the row by grad_scale * d loss / d logits; after loss(target, true).
  void write_gradient(std::int32_t target, A grad_scale) {
    const A scale = grad_scale / sum_;
    T* const hit = logits_ + target;
    if constexpr (kPrecise && !kCapped) {
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

  /// Maximum of max_ and n capped logits that aren't NaN; kStore writes them over the logits.
  template <bool kStore>
  A maximum(T* x, std::int64_t n) const {
    Vector<A> parts = Vector<A>{} + max_;
    std::int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      const Vector<A> c = capped(load_vector<A>(x + i));
      if constexpr (kStore) store_vector<A>(x + i, c);
      parts = larger<A>(c, parts);
    }
    A result = horizontal_max<A>(parts);
    for (; i < n; ++i) {
      const A c = capped(load(x + i));
      if constexpr (kStore) store(x + i, c);
      result = std::max(result, c);
    }
    return result;
  }

  /// Sum of e^(capped logit - reference) over n logits.
  template <bool kReplace>
  A exponentials(T* x, std::int64_t n, A reference) const {
    constexpr bool kStore = kReplace && !kCapped;
    const auto term = [&](auto c) { return exp_below((kReplace ? c : capped(c)) - reference); };
    Vector<A> parts[kUnrolled]{};
    std::int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      for (int line = 0; line < kStep; line += 64 / static_cast<int>(sizeof(T)))
        __builtin_prefetch(x + i + kAhead + line, 0, 2);
#pragma GCC unroll 2
      for (int u = 0; u < kUnrolled; ++u) {
        T* const at = x + i + u * kWidth;
        const Vector<A> e = term(load_vector<A>(at));
        if constexpr (kStore) store_vector<A>(at, e);
        parts[u] += e;
      }
    }
    A sum = horizontal_sum<A>(parts[0] + parts[1]);
    for (; i < n; ++i) {
      const A e = term(load(x + i));
      if constexpr (kStore) store(x + i, e);
      sum += e;
    }
    return sum;
  }

  /// scale * e^(c - max) - hit, times dc / d logit, where c is the capped logit.
  template <typename V>
  V gradient(V logit, A scale, A hit) const {
    const V c = kPrecise ? logit : capped(logit), g = exp_below(c - max_) * scale - hit;
    return kCapped ? g * (A(1) - c * inverse_cap_ * (c * inverse_cap_)) : g;
  }

  T* logits_;
  std::int64_t vocabulary_, block_;
  A cap_, inverse_cap_;
  A max_ = -std::numeric_limits<A>::infinity(), sum_ = 0;
  A references_[kMostBlocks];
};

template <bool kCapped, typename T, typename A>
A cross_entropy_row(T* logits, std::int64_t vocabulary, std::int32_t target, bool write_gradient,
                    A grad_scale, A cap) {
  if (target == kIgnoreTarget) {
    if (write_gradient)
      for (std::int64_t i = 0; i < vocabulary; ++i) store(logits + i, A(0));
    return 0;
  }
  Row<kCapped, T, A> row(logits, vocabulary, cap);
  if (!write_gradient) return row.template loss<false>(target);
  const A loss = row.template loss<std::is_same_v<T, A>>(target);
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
