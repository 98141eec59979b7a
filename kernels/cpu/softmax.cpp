#include "kernels/softmax.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

/// e^x for x <= 0; exp() saturates above 0, but -inf must give 0.
inline float exp_below(float x) { return x < -87.0F ? 0.0F : exp(x); }
inline double exp_below(double x) { return std::exp(x); }

/// Sum of term(i), i in [0, width): in blocks, so that rounding errors stay small in long rows.
template <typename A, typename Term>
inline A blocked_sum(std::int64_t width, const Term& term) {
  constexpr std::int64_t kBlock = 128;
  double total = 0;
  for (std::int64_t begin = 0; begin < width; begin += kBlock) {
    const std::int64_t end = std::min(width, begin + kBlock);
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = begin; i < end; ++i) sum += term(i);
    total += static_cast<double>(sum);
  }
  return static_cast<A>(total);
}

template <bool kLog, typename T>
void forward_row(const T* x, T* y, std::int64_t width) {
  using A = Accumulator<T>;
  A highest = -std::numeric_limits<A>::infinity();
#pragma omp simd reduction(max : highest)
  for (std::int64_t i = 0; i < width; ++i) {
    const A value = load(x + i);
    highest = value > highest ? value : highest;
  }
  const A sum =
      blocked_sum<A>(width, [=](std::int64_t i) { return exp_below(load(x + i) - highest); });
  if constexpr (kLog) {
    const A log_sum = std::log(sum);
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) store(y + i, load(x + i) - highest - log_sum);
  } else {
    const A factor = A(1) / sum;
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i)
      store(y + i, exp_below(load(x + i) - highest) * factor);
  }
}

template <bool kLog, bool kAccumulate, typename T>
void backward_row(const T* y, const T* grad_y, T* grad_x, std::int64_t width) {
  using A = Accumulator<T>;
  const A sum = blocked_sum<A>(width, [=](std::int64_t i) {
    return kLog ? load(grad_y + i) : load(grad_y + i) * load(y + i);
  });
#pragma omp simd
  for (std::int64_t i = 0; i < width; ++i) {
    const A grad = load(grad_y + i), kept = load(y + i);
    A value = kLog ? grad - exp_below(kept) * sum : kept * (grad - sum);
    if constexpr (kAccumulate) value += load(grad_x + i);
    store(grad_x + i, value);
  }
}

template <typename T>
void forward(Context& context, const SoftmaxForward& args) {
  const auto* x = static_cast<const T*>(args.x.data);
  auto* y = static_cast<T*>(args.y.data);
  const std::int64_t width = args.x.shape[1];
  visit_flag(args.log, [&](auto log) {
    for_rows(context, args.x.shape[0], width, [=](std::int64_t row, std::int64_t end) {
      for (; row < end; ++row) forward_row<log()>(x + row * width, y + row * width, width);
    });
  });
}

template <typename T>
void backward(Context& context, const SoftmaxBackward& args) {
  const auto* y = static_cast<const T*>(args.y.data);
  const auto* grad_y = static_cast<const T*>(args.grad_y.data);
  auto* grad_x = static_cast<T*>(args.grad_x.view.data);
  const std::int64_t width = args.y.shape[1];
  visit_flag(args.log, [&](auto log) {
    visit_flag(args.grad_x.accumulate, [&](auto accumulate) {
      for_rows(context, args.y.shape[0], width, [=](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row)
          backward_row<log(), accumulate()>(y + row * width, grad_y + row * width,
                                            grad_x + row * width, width);
      });
    });
  });
}

}  // namespace

void softmax_forward(Context& context, const SoftmaxForward& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) { forward<T>(context, args); });
}

void softmax_backward(Context& context, const SoftmaxBackward& args) {
  visit_dtype(args.y.dtype, [&]<typename T>(std::type_identity<T>) { backward<T>(context, args); });
}

TESSERA_CPU_END
