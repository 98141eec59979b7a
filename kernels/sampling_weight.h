#pragma once

#include <bit>
#include <cstdint>

// Arithmetic of sampling, with the same bits on all devices. Weights are integers, so that sums do
// not depend on their order, and come from operations that no compiler fuses or approximates.
namespace tessera::kernels {

/// Maps a logit other than NaN to an integer above 0. The integers have the order of the logits; 0
/// and -0 map to the same integer.
constexpr std::uint32_t logit_key(float logit) {
  const auto bits = std::bit_cast<std::uint32_t>(logit == 0.0F ? 0.0F : logit);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
constexpr float logit_of_key(std::uint32_t key) {
  return std::bit_cast<float>((key & 0x80000000U) != 0 ? key & 0x7fffffffU : ~key);
}
inline constexpr std::uint32_t kInfinityKey = 0xff800000U;
inline constexpr std::uint32_t kNegativeInfinityKey = 0x007fffffU;

/// Converts differences of logits to octaves (powers of 2) in fixed point, 32 fractional bits.
constexpr double octaves_per_logit(double temperature) {
  const double scale = 4294967296.0 * 1.44269504088896340736 / temperature;
  return scale < 1e300 ? scale : 1e300;  // finite, so that 0 times it is 0
}

/// Product of two fixed-point numbers with 32 fractional bits.
constexpr std::uint32_t upper_half(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>(std::uint64_t{a} * b >> 32);
}

/// e^((logit - largest) / temperature) * 2^40, relative error below 1e-9, rounded down, so that
/// tokens more than 2^40 times less likely than the most likely one are never drawn.
/// @param largest  finite, not below logit
constexpr std::uint64_t sampling_weight(float logit, float largest, double octaves_per_logit) {
  constexpr double kMost = 63.0 * 4294967296.0;
  const double distance =
      (static_cast<double>(largest) - static_cast<double>(logit)) * octaves_per_logit;
  const auto fixed = static_cast<std::int64_t>(distance < kMost ? distance : kMost);
  // 2^-fixed is 2^-octaves 2^g with g in [0, 1), and 2^g = 1 + g p(g), p of degree 6 (interpolated
  // at Chebyshev nodes); all numbers below have 32 fractional bits.
  const auto g = static_cast<std::uint32_t>(-fixed);
  const auto octaves = static_cast<int>((fixed + 0xffffffffLL) >> 32);
  std::uint32_t p = 89043;
  p = 627479 + upper_half(p, g);
  p = 5750554 + upper_half(p, g);
  p = 41301092 + upper_half(p, g);
  p = 238389752 + upper_half(p, g);
  p = 1031764902 + upper_half(p, g);
  p = 2977044473 + upper_half(p, g);
  const std::uint64_t power = (std::uint64_t{1} << 32) + upper_half(p, g);
  return (power << 8) >> octaves;
}

/// Sum of weights that top-p must reach: `fraction` of `total`, rounded up, at least 1.
constexpr std::uint64_t fraction_of_weights(std::uint64_t total, double fraction) {
  const double wanted = fraction * static_cast<double>(total);
  auto whole = static_cast<std::uint64_t>(wanted);
  if (static_cast<double>(whole) < wanted || whole == 0) ++whole;
  return whole < total ? whole : total;
}

/// Smallest weight that min-p keeps.
constexpr std::uint64_t least_weight(double min_p) {
  const double wanted = min_p * 1099511627776.0;
  const auto whole = static_cast<std::uint64_t>(wanted);
  return static_cast<double>(whole) < wanted ? whole + 1 : whole;
}

/// total * word / 2^32, rounded down, in [0, total). @param total  below 2^63
constexpr std::uint64_t draw_below(std::uint64_t total, std::uint32_t word) {
  return (total >> 32) * word + ((total & 0xffffffffU) * word >> 32);
}

/// Set of tokens to draw from: those with a key above the threshold, and those at the threshold up
/// to an id. By default, all tokens.
struct KeptTokens {
  std::uint32_t threshold = 0;
  std::int32_t last_at_threshold = -1;
  constexpr bool contains(std::uint32_t key, std::int32_t id) const {
    return key > threshold || (key == threshold && id <= last_at_threshold);
  }
};

}  // namespace tessera::kernels
