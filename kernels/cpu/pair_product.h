#pragma once

#include "kernels/cpu/vector.h"

// Products of small tiles of bf16 numbers in the first-level cache, by an instruction of AVX512-BF16 that
// multiplies pairs and adds both products to a float32 sum: twice as fast as tile_product.h.
#if defined(__AVX512F__)

TESSERA_CPU_BEGIN

/// Two bf16 numbers, neighbors along the depth of a product; the first in the lower half.
using Pair = std::uint32_t;

/// Whether the processor has the instruction.
inline bool multiplies_pairs() { return __builtin_cpu_supports("avx512bf16") != 0; }

#define TESSERA_PAIRS __attribute__((target("avx512bf16")))

template <int rows, int vectors>
TESSERA_PAIRS inline void pair_block(std::int64_t depth, const Pair* a, const Pair* b,
                                     std::int64_t b_stride, float* c, std::int64_t c_stride,
                                     float scale) {
  constexpr std::int64_t kWidth = kLanes<float>;
  __m512 sums[rows][vectors];
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < vectors; ++j) sums[i][j] = _mm512_setzero_ps();
  for (std::int64_t k = 0; k < depth; ++k) {
    __m512bh line[vectors];
    for (int j = 0; j < vectors; ++j)
      line[j] = __builtin_bit_cast(__m512bh, _mm512_loadu_si512(b + k * b_stride + j * kWidth));
    for (int i = 0; i < rows; ++i) {
      const auto pair =
          __builtin_bit_cast(__m512bh, _mm512_set1_epi32(static_cast<int>(a[i * depth + k])));
      for (int j = 0; j < vectors; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], pair, line[j]);
    }
  }
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < vectors; ++j)
      _mm512_storeu_ps(c + i * c_stride + j * kWidth, sums[i][j] * scale);
}

/// c = scale a b. a [m, depth] contiguous and b [depth, n] hold pairs along the depth, which counts pairs; n is a
/// multiple of kLanes<float>, m one of 8.
TESSERA_PAIRS inline void pair_product(std::int64_t m, std::int64_t n, std::int64_t depth,
                                       const Pair* a, const Pair* b, std::int64_t b_stride,
                                       float* c, std::int64_t c_stride, float scale) {
  constexpr int kRows = 8;
  constexpr std::int64_t kWidth = kLanes<float>;
  for (std::int64_t i = 0; i < m; i += kRows) {
    const Pair* const rows = a + i * depth;
    float* const to = c + i * c_stride;
    std::int64_t j = 0;
    for (; j + 2 * kWidth <= n; j += 2 * kWidth)
      pair_block<kRows, 2>(depth, rows, b + j, b_stride, to + j, c_stride, scale);
    if (j < n) pair_block<kRows, 1>(depth, rows, b + j, b_stride, to + j, c_stride, scale);
  }
}

#undef TESSERA_PAIRS

TESSERA_CPU_END

#endif
