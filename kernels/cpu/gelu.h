#pragma once

#include <cstdint>

#include "kernels/cpu/vector_math.h"

TESSERA_CPU_BEGIN

// The tanh form written with the logistic function s = 1 / (1 + e^(-2u)), u = kAlpha (x + kBeta
// x^3): 1 + tanh(u) = 2 s, hence y = x s and dy/dx = s + 2 x u' s (1 - s). This form stays
// accurate where 1 + tanh(u) cancels.
template <typename A>
struct Gelu {
  static constexpr A kAlpha = A(0.7978845608028654);  // sqrt(2 / pi)
  static constexpr A kBeta = A(0.044715);
  // Beyond kClamp, s is below 1e-33 or equal to 1; clamping there keeps e^(-2u) and x^3 finite.
  static constexpr A kClamp = A(9.5);

  A logistic;    ///< s
  A complement;  ///< 1 - s, without cancellation
  A slope;       ///< 2 x u'

  static inline Gelu at(A x) {
    A bounded = x < -kClamp ? -kClamp : x;
    bounded = bounded > kClamp ? kClamp : bounded;
    const A square = bounded * bounded;
    const A u = kAlpha * bounded * (A(1) + kBeta * square);
    const A power = exp(A(-2) * u);
    const A s = A(1) / (A(1) + power);
    return {s, power * s, A(2) * kAlpha * bounded * (A(1) + A(3) * kBeta * square)};
  }
};

/// y = gelu(x), for n elements.
template <typename T>
void gelu(const T* x, T* y, std::int64_t n) {
  using A = Accumulator<T>;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const A value = load(x + i);
    store(y + i, value * Gelu<A>::at(value).logistic);
  }
}

/// grad_x = grad_y gelu'(x) [+ grad_x], for n elements. grad_x may be grad_y.
template <bool kAccumulate, typename T>
void gelu_gradient(const T* x, const T* grad_y, T* grad_x, std::int64_t n) {
  using A = Accumulator<T>;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const A value = load(x + i);
    const Gelu<A> g = Gelu<A>::at(value);
    const A derivative = g.logistic + g.slope * (g.logistic * g.complement);
    A grad = load(grad_y + i) * derivative;
    if constexpr (kAccumulate) grad += load(grad_x + i);
    store(grad_x + i, grad);
  }
}

TESSERA_CPU_END
