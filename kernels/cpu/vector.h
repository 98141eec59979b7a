#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/cpu/level.h"
#include "kernels/cpu/vector_math.h"

// Vectors as wide as the registers of the CPU level, as the compiler's vector types.
TESSERA_CPU_BEGIN

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kRegisters = 32;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kRegisters = 16;
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kRegisters = 16;
#endif

template <typename T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = float __attribute__((vector_size(kVectorBytes)));
  using Index = std::int32_t __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  using Type = double __attribute__((vector_size(kVectorBytes)));
  using Index = std::int64_t __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vector = typename VectorOf<T>::Type;

/// Element by element, which compiles to one load that widens; __builtin_convertvector doesn't.
template <int... lane>
inline Vector<float> widen_bf16(const BFloat16* p, std::integer_sequence<int, lane...>) {
  using Bits = std::uint32_t __attribute__((vector_size(kVectorBytes)));
  return std::bit_cast<Vector<float>>(Bits{p[lane].bits...} << 16);
}

/// Loads kLanes<T> elements from any address and converts them to T.
template <typename T, typename E>
inline Vector<T> load_vector(const E* p) {
  Vector<T> v;
  if constexpr (std::is_same_v<T, E>) {
    std::memcpy(&v, p, sizeof(v));
  } else if constexpr (std::is_same_v<E, BFloat16> && std::is_same_v<T, float>) {
    v = widen_bf16(p, std::make_integer_sequence<int, kLanes<float>>{});
  } else {
    T values[kLanes<T>];
#pragma omp simd
    for (int i = 0; i < kLanes<T>; ++i) values[i] = static_cast<T>(load(p + i));
    std::memcpy(&v, values, sizeof(v));
  }
  return v;
}
template <typename T>
inline void store_vector(T* p, Vector<T> v) {
  std::memcpy(p, &v, sizeof(v));
}
/// Rounds as store() does.
inline void store_vector(BFloat16* p, Vector<float> v) {
  using Bits = std::uint32_t __attribute__((vector_size(kVectorBytes)));
  using Halves = std::uint16_t __attribute__((vector_size(kVectorBytes / 2)));
  const Bits u = std::bit_cast<Bits>(v);
  const Bits bits = v == v ? u + 0x7fffU + ((u >> 16) & 1U) : u | 0x400000U;
  const Halves upper = __builtin_convertvector(bits >> 16, Halves);
  std::memcpy(p, &upper, sizeof(upper));
}

/// The type of a vector's lanes, or a number's own.
template <typename V>
struct ElementOf {
  using Type = std::remove_cvref_t<decltype(V{}[0])>;
};
template <typename V>
requires std::is_arithmetic_v<V>
struct ElementOf<V> {
  using Type = V;
};
template <typename V>
using Element = typename ElementOf<V>::Type;

/// Elements from p as a V: a vector of the accumulator, or one accumulator.
template <typename V, typename E>
inline V load_as(const E* p) {
  if constexpr (std::is_arithmetic_v<V>)
    return static_cast<V>(load(p));
  else
    return load_vector<Element<V>>(p);
}
template <typename E, typename V>
inline void store_as(E* p, V v) {
  if constexpr (std::is_arithmetic_v<V>)
    store(p, v);
  else
    store_vector(p, v);
}

/// Calls f(std::type_identity<V>, i) for elements i... of [0, n): as many vectors as fit, and then one by one.
/// With 2-byte elements, explicit vectors are up to three times faster than the compiler's.
template <typename A, typename F>
inline void for_vectors(std::int64_t n, const F& f) {
  std::int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) f(std::type_identity<Vector<A>>{}, i);
  for (; i < n; ++i) f(std::type_identity<A>{}, i);
}

/// a > b ? a : b in each lane, hence b where either is NaN. One instruction for f32 on x86, where the
/// compiler would make two of the comparison.
template <typename T>
inline Vector<T> larger(Vector<T> a, Vector<T> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) return _mm512_mask_max_ps(a, 0xFFFF, a, b);
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>) return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  if constexpr (std::is_same_v<T, float>) return _mm_max_ps(a, b);
#endif
  return a > b ? a : b;
}
/// The same for a < b ? a : b.
template <typename T>
inline Vector<T> smaller(Vector<T> a, Vector<T> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) return _mm512_mask_min_ps(a, 0xFFFF, a, b);
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>) return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  if constexpr (std::is_same_v<T, float>) return _mm_min_ps(a, b);
#endif
  return a < b ? a : b;
}
/// x bounded to [least, most], a vector or a number; NaN stays NaN.
template <typename V>
inline V clamp(V x, Element<V> least, Element<V> most) {
  if constexpr (std::is_arithmetic_v<V>) {
    x = x < least ? least : x;
    return x > most ? most : x;
  } else {
    return smaller<Element<V>>(V{} + most, larger<Element<V>>(V{} + least, x));
  }
}

template <typename T>
using IndexVector = typename VectorOf<T>::Index;

/// 0, 1, 2, ...
template <typename T, int... lane>
constexpr IndexVector<T> lane_numbers(std::integer_sequence<int, lane...>) {
  return IndexVector<T>{lane...};
}
template <typename T>
inline constexpr IndexVector<T> kLaneNumbers =
    lane_numbers<T>(std::make_integer_sequence<int, kLanes<T>>{});

/// v with lanes i and i ^ distance swapped; distance is a power of two.
template <int distance, typename T, int... lane>
inline Vector<T> swap_lanes(Vector<T> v, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(v, v, (lane ^ distance)...);
}

/// Reduces v by a commutative combine(), halving the vector each time. (A reduction by `#pragma omp
/// simd` would add the lanes one after the other.)
template <typename T, int width = kLanes<T>, typename Combine>
inline T reduce(Vector<T> v, Combine&& combine) {
  if constexpr (width == 1) {
    return v[0];
  } else {
    const Vector<T> other =
        swap_lanes<width / 2, T>(v, std::make_integer_sequence<int, kLanes<T>>{});
    return reduce<T, width / 2>(combine(v, other), combine);
  }
}
template <typename T>
inline T horizontal_sum(Vector<T> v) {
  return reduce<T>(v, [](Vector<T> a, Vector<T> b) { return a + b; });
}
template <typename T>
inline T horizontal_max(Vector<T> v) {
  return reduce<T>(v, larger<T>);
}

/// The sum over i of f(std::type_identity<V>, i), which is a V; see for_vectors().
template <typename A, typename F>
inline A vector_sum(std::int64_t n, const F& f) {
  Vector<A> even{}, odd{};
  std::int64_t i = 0;
  for (; i + 2 * kLanes<A> <= n; i += 2 * kLanes<A>) {
    even += f(std::type_identity<Vector<A>>{}, i);
    odd += f(std::type_identity<Vector<A>>{}, i + kLanes<A>);
  }
  A rest = 0;
  for (; i < n; ++i) rest += f(std::type_identity<A>{}, i);
  return horizontal_sum<A>(even + odd) + rest;
}

/// exp_in_range() of vector_math.h for vectors.
inline Vector<float> exp_in_range(Vector<float> x) {
#if defined(__AVX512F__)
  const Vector<float> n =
      _mm512_mask_roundscale_ps(x, 0xFFFF, x * 1.44269504088896341F, _MM_FROUND_TO_NEAREST_INT);
#else
  using Bits = IndexVector<float>;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const Vector<float> shifted = x * 1.44269504088896341F + kRound;
  const Vector<float> n = shifted - kRound;
#endif
  Vector<float> r = x - n * 0.693359375F;
  r = r + n * 2.12194440e-4F;
  Vector<float> p = 1.3814539975e-3F * r + 8.3687452567e-3F;
  p = p * r + 4.1668390797e-2F;
  p = p * r + 1.6666520398e-1F;
  p = p * r + 4.9999993432e-1F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
#if defined(__AVX512F__)
  return _mm512_mask_scalef_ps(p, 0xFFFF, p, n);
#else
  const Bits exponent = std::bit_cast<Bits>(shifted) - std::bit_cast<std::int32_t>(kRound);
  const Bits power = (exponent + 127) << 23;
  return p * std::bit_cast<Vector<float>>(power);
#endif
}
inline Vector<double> exp_in_range(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = exp(x[i]);
  return x;
}
/// The same for any x: results saturate near 1e-38 and 3e38.
inline Vector<float> exp(Vector<float> x) { return exp_in_range(clamp(x, -87.0F, 88.0F)); }

/// tanh x, relative error below 3e-7; NaN stays NaN. A polynomial near 0 (Cephes' tanhf
/// coefficients), where 1 - 2 / (e^2x + 1) cancels.
inline Vector<float> tanh(Vector<float> x) {
  const Vector<float> square = x * x, size = x < 0.0F ? -x : x;
  Vector<float> p = -5.70498872745e-3F * square + 2.06390887954e-2F;
  p = p * square - 5.37397155531e-2F;
  p = p * square + 1.33314422036e-1F;
  p = p * square - 3.33332819422e-1F;
  const Vector<float> far = 1.0F - 2.0F / (exp(2.0F * size) + 1.0F);
  return size < 0.625F ? p * square * x + x : (x < 0.0F ? -far : far);
}
inline Vector<double> tanh(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}

/// Swaps the off-diagonal squares of side `step` in a matrix whose rows are v.
template <typename T, int step, int... lane>
inline void swap_squares(Vector<T>* v, std::integer_sequence<int, lane...>) {
  constexpr int kWidth = sizeof...(lane);
  for (int i = 0; i < kWidth; ++i) {
    if ((i & step) != 0) continue;
    const Vector<T> upper = __builtin_shufflevector(
        v[i], v[i + step], ((lane & step) != 0 ? kWidth + lane - step : lane)...);
    v[i + step] = __builtin_shufflevector(v[i], v[i + step],
                                          ((lane & step) != 0 ? kWidth + lane : lane + step)...);
    v[i] = upper;
  }
}
template <typename T, int step = 1>
inline void transpose(Vector<T>* v) {
  if constexpr (step < kLanes<T>) {
    swap_squares<T, step>(v, std::make_integer_sequence<int, kLanes<T>>{});
    transpose<T, 2 * step>(v);
  }
}

/// to[j * to_stride + i] = scale * from[i * from_stride + j] for i < rows, j < columns; writes
/// `width` elements of each row of `to`, zeros for i >= rows.
template <int width, typename T, typename E>
void copy_transposed(T* to, std::int64_t to_stride, const E* from, std::int64_t from_stride,
                     std::int64_t rows, std::int64_t columns, T scale) {
  static_assert(width <= kLanes<T>);
  constexpr int kWidth = kLanes<T>;
  std::int64_t j = 0;
  for (; j + kWidth <= columns; j += kWidth) {
    Vector<T> v[kWidth];
    for (int i = 0; i < kWidth; ++i)
      v[i] =
          i < width && i < rows ? load_vector<T>(from + i * from_stride + j) * scale : Vector<T>{};
    transpose<T>(v);
    for (int i = 0; i < kWidth; ++i)
      std::memcpy(to + (j + i) * to_stride, &v[i], width * sizeof(T));
  }
  for (; j < columns; ++j)
    for (int i = 0; i < width; ++i)
      to[j * to_stride + i] =
          i < rows ? scale * static_cast<T>(load(from + i * from_stride + j)) : T(0);
}

TESSERA_CPU_END
