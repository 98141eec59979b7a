#pragma once

#include <cstdint>

#include "kernels/cpu/vector.h"

TESSERA_CPU_BEGIN

// The tanh form written with the logistic function s = 1 / (1 + e^(-2u)), u = kAlpha (x + kBeta
// x^3): 1 + tanh(u) = 2 s, hence y = x s and dy/dx = s + 2 x u' s (1 - s). This form stays
// accurate where 1 + tanh(u) cancels.
/// @tparam V  a vector of the accumulator, or one accumulator
template <typename V>
struct Gelu {
  using A = Element<V>;
  static constexpr A kAlpha = A(0.7978845608028654);  // sqrt(2 / pi)
  static constexpr A kBeta = A(0.044715);
  // Beyond kClamp, s is below 1e-33 or equal to 1; clamping there keeps e^(-2u) and x^3 finite.
  static constexpr A kClamp = A(9.5);

  V logistic;    ///< s
  V complement;  ///< 1 - s, without cancellation
  V slope;       ///< 2 x u'

  static inline Gelu at(V x) {
    const V bounded = clamp(x, -kClamp, kClamp);
    const V square = bounded * bounded;
    const V power =
        exp_in_range(bounded * (A(-2) * kAlpha + A(-2) * kAlpha * kBeta * square));  // e^(-2u)
    const V s = A(1) / (A(1) + power);
    return {s, power * s, bounded * (A(2) * kAlpha + A(6) * kAlpha * kBeta * square)};
  }
};

/// y = gelu(x), for n elements.
template <typename T>
void gelu(const T* x, T* y, std::int64_t n) {
  for_vectors<Accumulator<T>>(n, [=]<typename V>(std::type_identity<V>, std::int64_t i) {
    const V v = load_as<V>(x + i);
    store_as(y + i, v * Gelu<V>::at(v).logistic);
  });
}

/// grad_x = grad_y gelu'(x) [+ grad_x], for n elements. grad_x may be grad_y.
template <bool kAccumulate, typename T>
void gelu_gradient(const T* x, const T* grad_y, T* grad_x, std::int64_t n) {
  for_vectors<Accumulator<T>>(n, [=]<typename V>(std::type_identity<V>, std::int64_t i) {
    const Gelu<V> g = Gelu<V>::at(load_as<V>(x + i));
    V grad = load_as<V>(grad_y + i) * (g.logistic + g.slope * (g.logistic * g.complement));
    if constexpr (kAccumulate) grad += load_as<V>(grad_x + i);
    store_as(grad_x + i, grad);
  });
}

TESSERA_CPU_END
