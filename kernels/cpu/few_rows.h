#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/level.h"
#include "kernels/cpu/vector.h"

// Products with few rows of a, as when tokens are generated. The memory's speed is the limit: b is
// read from memory once, and not packed or widened there. A core reads faster from several places
// at a time, each in the order of addresses, so b is read from kStreams places that lie as far
// apart as possible. Each row's result is the same, to the bit, whatever the number of rows.
TESSERA_CPU_BEGIN

inline constexpr std::int64_t kFewRows = 16;
/// Parts of k whose sums are added at the end; a constant, so that threads don't change results.
inline constexpr std::int64_t kSlices = 4;
inline constexpr std::int64_t kStreams = 4;
/// Rows of a that are multiplied with b's elements while these are in registers: in sums of b's
/// rows, and in dot products, whose sums stay in registers, too.
inline constexpr int kAddedRows = 4;
inline constexpr int kDotRows = kRegisters == 32 ? 4 : 3;
/// Columns of b that are multiplied with all rows of a, while a cache holds them.
inline constexpr std::int64_t kColumnBlock = 1024;

/// sums[rows, n] += a[rows, streams] b[streams, n]
/// @param step  distance of the columns of a, and of the rows of b
template <int rows, int streams, typename T>
void add_rows(float* sums, std::int64_t sums_stride, const float* a, std::int64_t a_stride,
              const T* b, std::int64_t b_stride, std::int64_t step, std::int64_t n) {
  constexpr int kStep = kLanes<float>;
  float factors[rows][streams];
  for (int i = 0; i < rows; ++i)
    for (int t = 0; t < streams; ++t) factors[i][t] = a[i * a_stride + t * step];
  const std::int64_t next = step * b_stride;
  std::int64_t j = 0;
  for (; j + kStep <= n; j += kStep) {
    Vector<float> sum[rows];
    for (int i = 0; i < rows; ++i) sum[i] = load_vector<float>(sums + i * sums_stride + j);
    for (int t = 0; t < streams; ++t) {
      const Vector<float> row = load_vector<float>(b + t * next + j);
      for (int i = 0; i < rows; ++i) sum[i] += factors[i][t] * row;
    }
    for (int i = 0; i < rows; ++i) store_vector(sums + i * sums_stride + j, sum[i]);
  }
  for (; j < n; ++j)
    for (int i = 0; i < rows; ++i) {
      float sum = sums[i * sums_stride + j];
      for (int t = 0; t < streams; ++t) sum += factors[i][t] * load(b + t * next + j);
      sums[i * sums_stride + j] = sum;
    }
}

/// sums[rows, streams] = a[rows, k] b[streams, k]^T
/// @param step  distance of the columns of sums, and of the rows of b
template <int rows, int streams, typename T>
void dots(float* sums, std::int64_t sums_stride, const float* a, std::int64_t a_stride, const T* b,
          std::int64_t b_stride, std::int64_t step, std::int64_t k) {
  constexpr int kStep = kLanes<float>;
  const std::int64_t next = step * b_stride;
  Vector<float> lanes[rows][streams] = {};
  std::int64_t p = 0;
  for (; p + kStep <= k; p += kStep) {
    Vector<float> from[rows];
    for (int i = 0; i < rows; ++i) from[i] = load_vector<float>(a + i * a_stride + p);
    for (int t = 0; t < streams; ++t) {
      const Vector<float> row = load_vector<float>(b + t * next + p);
      for (int i = 0; i < rows; ++i) lanes[i][t] += from[i] * row;
    }
  }
  for (int i = 0; i < rows; ++i)
    for (int t = 0; t < streams; ++t) {
      float sum = horizontal_sum<float>(lanes[i][t]);
      for (std::int64_t rest = p; rest < k; ++rest)
        sum += a[i * a_stride + rest] * load(b + t * next + rest);
      sums[i * sums_stride + t * step] = sum;
    }
}

/// Products of `groups` matrices a, one below the other as their sums are, with matrices b that lie
/// side by side, such as heads.
template <typename T>
struct FewRows {
  float* sums;  // [groups, m, n]
  std::int64_t sums_stride;
  const float* a;  // [groups, m, k]
  std::int64_t a_stride;
  const T* b;
  std::int64_t b_stride;
  std::int64_t m, n, k;
  std::int64_t groups = 1, b_distance = 0;

  /// Calls block(a constant: rows, sums, a, b) with the operands of `most` rows or one of a group.
  template <int most, typename Block>
  void for_blocks(Block&& block) const {
    for (std::int64_t g = 0; g < groups; ++g) {
      const auto call = [&](auto rows, std::int64_t i) {
        block(rows, sums + (g * m + i) * sums_stride, a + (g * m + i) * a_stride,
              b + g * b_distance);
      };
      std::int64_t i = 0;
      for (; i + most <= m; i += most) call(std::integral_constant<int, most>(), i);
      for (; i < m; ++i) call(std::integral_constant<int, 1>(), i);
    }
  }
};

/// sums += a b, with b [k, n]
template <typename T>
void add_few_rows(const FewRows<T>& r) {
  const std::int64_t step = r.k / kStreams;
  const auto add = [&](auto streams, std::int64_t p) {
    for (std::int64_t j = 0; j < r.n; j += kColumnBlock)
      r.template for_blocks<kAddedRows>([&](auto rows, float* sums, const float* a, const T* b) {
        add_rows<rows(), streams()>(sums + j, r.sums_stride, a + p, r.a_stride,
                                    b + p * r.b_stride + j, r.b_stride, step,
                                    std::min(kColumnBlock, r.n - j));
      });
  };
  for (std::int64_t p = 0; p < step; ++p) add(std::integral_constant<int, kStreams>(), p);
  for (std::int64_t p = kStreams * step; p < r.k; ++p) add(std::integral_constant<int, 1>(), p);
}

/// sums = a b^T, with b [n, k]
template <typename T>
void few_dots(const FewRows<T>& r) {
  const std::int64_t step = r.n / kStreams;
  const auto multiply = [&](auto streams, std::int64_t j) {
    r.template for_blocks<kDotRows>([&](auto rows, float* sums, const float* a, const T* b) {
      dots<rows(), streams()>(sums + j, r.sums_stride, a, r.a_stride, b + j * r.b_stride,
                              r.b_stride, step, r.k);
    });
  };
  for (std::int64_t j = 0; j < step; ++j) multiply(std::integral_constant<int, kStreams>(), j);
  for (std::int64_t j = kStreams * step; j < r.n; ++j)
    multiply(std::integral_constant<int, 1>(), j);
}

TESSERA_CPU_END
