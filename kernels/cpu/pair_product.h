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

/// A tile of pairs; (i, k), row i and terms 2 k and 2 k + 1, is at data[i * row + k * column].
struct PairOperand {
  const Pair* data;
  std::int64_t row, column;
};

template <bool accumulate, int rows, int vectors>
TESSERA_PAIRS inline void pair_block(std::int64_t depth, PairOperand a, const Pair* b,
                                     std::int64_t b_stride, float* c, std::int64_t c_stride,
                                     float scale) {
  constexpr std::int64_t kWidth = kLanes<float>;
  __m512 sums[rows * vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows * vectors; ++i)
    sums[i] = accumulate ? _mm512_loadu_ps(c + i / vectors * c_stride + i % vectors * kWidth)
                         : _mm512_setzero_ps();
  for (std::int64_t k = 0; k < depth; ++k) {
    __m512bh line[vectors];
    for (int j = 0; j < vectors; ++j)
      line[j] = __builtin_bit_cast(__m512bh, _mm512_loadu_si512(b + k * b_stride + j * kWidth));
#pragma GCC unroll 16
    for (int i = 0; i < rows * vectors; ++i) {
      const auto pair =
          _mm512_set1_epi32(static_cast<int>(a.data[i / vectors * a.row + k * a.column]));
      sums[i] = _mm512_dpbf16_ps(sums[i], __builtin_bit_cast(__m512bh, pair), line[i % vectors]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows * vectors; ++i)
    _mm512_storeu_ps(c + i / vectors * c_stride + i % vectors * kWidth,
                     accumulate ? sums[i] : sums[i] * scale);
}

/// c = scale a b, or c += a b. a [m, depth] and b [depth, n] hold pairs along the depth, which counts pairs; n is
/// a multiple of kLanes<float>, m one of 8.
template <bool accumulate>
TESSERA_PAIRS inline void pair_product(std::int64_t m, std::int64_t n, std::int64_t depth,
                                       PairOperand a, const Pair* b, std::int64_t b_stride,
                                       float* c, std::int64_t c_stride, float scale) {
  constexpr int kRows = 8;
  constexpr std::int64_t kWidth = kLanes<float>;
  for (std::int64_t i = 0; i < m; i += kRows) {
    const PairOperand rows{a.data + i * a.row, a.row, a.column};
    float* const to = c + i * c_stride;
    std::int64_t j = 0;
    for (; j + 2 * kWidth <= n; j += 2 * kWidth)
      pair_block<accumulate, kRows, 2>(depth, rows, b + j, b_stride, to + j, c_stride, scale);
    if (j < n)
      pair_block<accumulate, kRows, 1>(depth, rows, b + j, b_stride, to + j, c_stride, scale);
  }
}

/// to[j] = (even[j], odd[j]), rounded to bf16, for j < n. Reads and writes whole vectors.
TESSERA_PAIRS inline void pair_up(const float* even, const float* odd, std::int64_t n, Pair* to) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (std::int64_t j = 0; j < n; j += kLanes<float>) {
    const auto halves = __builtin_bit_cast(
        __m512i, _mm512_cvtne2ps_pbh(_mm512_loadu_ps(odd + j), _mm512_loadu_ps(even + j)));
    _mm512_storeu_si512(to + j, _mm512_permutexvar_epi16(order, halves));
  }
}

/// to[j] = (from[2 j], from[2 j + 1]), rounded to bf16, for j < n / 2. Reads and writes whole vectors of pairs.
TESSERA_PAIRS inline void round_row(const float* from, std::int64_t n, Pair* to) {
  for (std::int64_t j = 0; j < n; j += 2 * kLanes<float>) {
    const __m512bh pairs =
        _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + j + kLanes<float>), _mm512_loadu_ps(from + j));
    _mm512_storeu_si512(to + j / 2, __builtin_bit_cast(__m512i, pairs));
  }
}

#undef TESSERA_PAIRS

TESSERA_CPU_END

#endif
