#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "core/base/rng.h"
#include "kernels/cpu/vector.h"

// Random words for loops over elements.
TESSERA_CPU_BEGIN

/// Lanes of 64 bits, in which only the lower halves count.
using Lanes = std::uint64_t __attribute__((vector_size(kVectorBytes)));
inline constexpr int kCounters = kVectorBytes / 8;
inline constexpr int kVectors = 2;  ///< of counters at a time, which hide each other's latency
inline constexpr std::int64_t kWordsDrawn = 4 * kVectors * kCounters;

/// Products of the lower halves, one instruction on x86.
inline Lanes product_of_halves(Lanes a, Lanes b) {
#if defined(__AVX512F__)
  return std::bit_cast<Lanes>(
      _mm512_maskz_mul_epu32(0xFF, std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return std::bit_cast<Lanes>(
      _mm256_mul_epu32(std::bit_cast<__m256i>(a), std::bit_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return std::bit_cast<Lanes>(_mm_mul_epu32(std::bit_cast<__m128i>(a), std::bit_cast<__m128i>(b)));
#else
  return (a & 0xFFFFFFFFU) * (b & 0xFFFFFFFFU);
#endif
}

/// Writes kWordsDrawn words of a stream, from word 4 first on: Philox4x32-10 of core/base/rng.h with
/// one counter per lane.
inline void draw(const RngKey& key, std::uint64_t first, std::uint32_t* words) {
  Lanes c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    for (int lane = 0; lane < kCounters; ++lane)
      c0[v][lane] = first + static_cast<std::uint64_t>(v * kCounters + lane);
    c1[v] = c0[v] >> 32;
    c2[v] = Lanes{} + key.stream;
    c3[v] = c2[v] >> 32;
  }
  auto key0 = static_cast<std::uint32_t>(key.key);
  auto key1 = static_cast<std::uint32_t>(key.key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Lanes product0 = product_of_halves(c0[v], Lanes{} + 0xD2511F53U);
      const Lanes product1 = product_of_halves(c2[v], Lanes{} + 0xCD9E8D57U);
      c0[v] = (product1 >> 32) ^ c1[v] ^ key0;
      c1[v] = product1;
      c2[v] = (product0 >> 32) ^ c3[v] ^ key1;
      c3[v] = product0;
    }
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  for (int v = 0; v < kVectors; ++v) {
    const Lanes lower = (c0[v] & 0xFFFFFFFFU) | (c1[v] << 32);
    const Lanes upper = (c2[v] & 0xFFFFFFFFU) | (c3[v] << 32);
    for (int lane = 0; lane < kCounters; ++lane) {
      const std::uint64_t four[2] = {lower[lane], upper[lane]};
      std::memcpy(words + 4 * (v * kCounters + lane), four, sizeof(four));
    }
  }
}

/// Calls body(i, count, words) for parts [i, i + count) of [begin, end): words[j] is word
/// first_element + i + j of the stream. Parts end at multiples of 256, whatever `begin` is.
template <typename Body>
void for_random_words(const RngKey& key, std::uint64_t first_element, std::int64_t begin,
                      std::int64_t end, const Body& body) {
  constexpr std::int64_t kPart = 256;
  std::uint32_t words[kPart + kWordsDrawn];
  for (std::int64_t i = begin; i < end;) {
    const std::uint64_t number = first_element + static_cast<std::uint64_t>(i);
    const auto skip = static_cast<std::int64_t>(number % 4);
    const std::int64_t count = std::min(end - i, kPart - i % kPart);
    for (std::int64_t w = 0; w < skip + count; w += kWordsDrawn)
      draw(key, number / 4 + static_cast<std::uint64_t>(w / 4), words + w);
    body(i, count, static_cast<const std::uint32_t*>(words + skip));
    i += count;
  }
}

TESSERA_CPU_END
