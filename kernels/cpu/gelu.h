#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/vector.h"

TESSERA_CPU_BEGIN

inline constexpr std::int64_t kGeluTile = 256;  // bf16 numbers that are widened at a time

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
template <typename A>
void gelu(const A* x, A* y, std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] * Gelu<A>::at(x[i]).logistic;
}
inline void gelu(const BFloat16* x, BFloat16* y, std::int64_t n) {
  float tile[kGeluTile];
  for (std::int64_t i = 0; i < n; i += kGeluTile) {
    const std::int64_t count = std::min(kGeluTile, n - i);
    widen(x + i, tile, count);
    gelu(tile, tile, count);
    narrow(tile, y + i, count);
  }
}

/// grad_x = grad_y gelu'(x) [+ grad_x], for n elements. grad_x may be grad_y.
template <bool kAccumulate, typename A>
void gelu_gradient(const A* x, const A* grad_y, A* grad_x, std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const Gelu<A> g = Gelu<A>::at(x[i]);
    const A grad = grad_y[i] * (g.logistic + g.slope * (g.logistic * g.complement));
    grad_x[i] = kAccumulate ? grad_x[i] + grad : grad;
  }
}
template <bool kAccumulate>
void gelu_gradient(const BFloat16* x, const BFloat16* grad_y, BFloat16* grad_x, std::int64_t n) {
  float tile[kGeluTile], upstream[kGeluTile], grad[kGeluTile];
  for (std::int64_t i = 0; i < n; i += kGeluTile) {
    const std::int64_t count = std::min(kGeluTile, n - i);
    widen(x + i, tile, count);
    widen(grad_y + i, upstream, count);
    if constexpr (kAccumulate) widen(grad_x + i, grad, count);
    gelu_gradient<kAccumulate>(tile, upstream, grad, count);
    narrow(grad, grad_x + i, count);
  }
}

TESSERA_CPU_END
