#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/cpu/level.h"
#include "kernels/cpu/vector_math.h"

// Vectors of the widest registers of the level, as the compiler's vector types.
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

/// kLanes<T> elements as T, from any address.
template <typename T, typename E>
inline Vector<T> load_vector(const E* p) {
  Vector<T> v;
  if constexpr (std::is_same_v<T, E>) {
    std::memcpy(&v, p, sizeof(v));
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

/// Swaps the off-diagonal squares of side `step` in a matrix whose rows are v.
template <typename T, int step, int... lane>
inline void swap_squares(Vector<T>* v, std::integer_sequence<int, lane...>) {
  using Mask = typename VectorOf<T>::Index;
  constexpr int kWidth = sizeof...(lane);
  constexpr Mask kUpper = {((lane & step) != 0 ? kWidth + lane - step : lane)...};
  constexpr Mask kLower = {((lane & step) != 0 ? kWidth + lane : lane + step)...};
  for (int i = 0; i < kWidth; ++i) {
    if ((i & step) != 0) continue;
    const Vector<T> upper = __builtin_shuffle(v[i], v[i + step], kUpper);
    v[i + step] = __builtin_shuffle(v[i], v[i + step], kLower);
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

/// to[j * to_stride + i] = scale * from[i * from_stride + j] for i < rows, j < columns; `width`
/// elements of a row of `to` are written, zeros where i is rows or more.
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
