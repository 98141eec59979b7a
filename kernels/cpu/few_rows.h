#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/level.h"
#include "kernels/cpu/vector.h"

// Products of bf16 matrices with few rows of a, as when tokens are generated. The memory's speed is
// the limit: each element of b is read once, in the order of addresses, and not packed or widened
// in memory.
TESSERA_CPU_BEGIN

inline constexpr std::int64_t kFewRows = 16;
/// Parts of k whose sums are added at the end; a constant, so that threads don't change results.
inline constexpr std::int64_t kSlices = 4;

/// Copies of parts of four rows of b in f32.
struct FourRows {
  static constexpr std::int64_t kMost = 2048;
  alignas(64) float row[4][kMost];

  FourRows& copy(const BFloat16* b, std::int64_t stride, std::int64_t n) {
    for (int r = 0; r < 4; ++r) {
#pragma omp simd
      for (std::int64_t j = 0; j < n; ++j) row[r][j] = load(b + r * stride + j);
    }
    return *this;
  }
};

/// Elements ahead that loads are started: the processor does it too late by itself.
inline constexpr int kAhead = 1024;

/// sums[j] += f b[j]
inline void add_row(float* sums, float f, const BFloat16* b, std::int64_t n) {
  constexpr int kStep = kLanes<float>;
  std::int64_t j = 0;
  for (; j + 4 * kStep <= n; j += 4 * kStep) {
    __builtin_prefetch(b + j + kAhead);
    for (int i = 0; i < 4; ++i) {
      float* const to = sums + j + i * kStep;
      store_vector(to, load_vector<float>(to) + f * load_vector<float>(b + j + i * kStep));
    }
  }
  for (; j < n; ++j) sums[j] += f * load(b + j);
}

/// sums[m, n] += a[m, k] b[k, n]
inline void add_few_rows(float* sums, std::int64_t sums_stride, const float* a,
                         std::int64_t a_stride, const BFloat16* b, std::int64_t b_stride,
                         std::int64_t m, std::int64_t n, std::int64_t k) {
  std::int64_t p = 0;
  FourRows four;
  for (; m > 1 && p + 4 <= k; p += 4)
    for (std::int64_t from = 0; from < n; from += FourRows::kMost) {
      const std::int64_t length = std::min(FourRows::kMost, n - from);
      const auto& row = four.copy(b + p * b_stride + from, b_stride, length).row;
      for (std::int64_t i = 0; i < m; ++i) {
        float* const to = sums + i * sums_stride + from;
        const float* const f = a + i * a_stride + p;
        const float f0 = f[0], f1 = f[1], f2 = f[2], f3 = f[3];
#pragma omp simd
        for (std::int64_t j = 0; j < length; ++j)
          to[j] += f0 * row[0][j] + f1 * row[1][j] + f2 * row[2][j] + f3 * row[3][j];
      }
    }
  for (; p < k; ++p)
    for (std::int64_t i = 0; i < m; ++i)
      add_row(sums + i * sums_stride, a[i * a_stride + p], b + p * b_stride, n);
}

/// @return the dot product of a and b
template <typename T>
float dot(const float* a, const T* b, std::int64_t k) {
  constexpr int kStep = kLanes<float>;
  Vector<float> sums[4] = {};
  std::int64_t p = 0;
  for (; p + 4 * kStep <= k; p += 4 * kStep) {
    __builtin_prefetch(b + p + kAhead);
    for (int i = 0; i < 4; ++i)
      sums[i] += load_vector<float>(a + p + i * kStep) * load_vector<float>(b + p + i * kStep);
  }
  float sum = 0;
  const Vector<float> all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int i = 0; i < kStep; ++i) sum += all[i];
  for (; p < k; ++p) sum += a[p] * load(b + p);
  return sum;
}

/// sums[m, n] = a[m, k] b[n, k]^T
inline void few_dots(float* sums, std::int64_t sums_stride, const float* a, const BFloat16* b,
                     std::int64_t b_stride, std::int64_t m, std::int64_t n, std::int64_t k) {
  std::int64_t j = 0;
  FourRows four;
  for (; m > 1 && k <= FourRows::kMost && j + 4 <= n; j += 4) {
    four.copy(b + j * b_stride, b_stride, k);
    for (std::int64_t i = 0; i < m; ++i)
      for (int r = 0; r < 4; ++r) sums[i * sums_stride + j + r] = dot(a + i * k, four.row[r], k);
  }
  for (; j < n; ++j)
    for (std::int64_t i = 0; i < m; ++i)
      sums[i * sums_stride + j] = dot(a + i * k, b + j * b_stride, k);
}

TESSERA_CPU_END
