#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/base/dtype.h"
#include "kernels/cpu/level.h"

// Branch-free functions that the compiler vectorizes inside `#pragma omp simd` loops.
TESSERA_CPU_BEGIN

/// e^x for f32 with x in [-87, 88] or NaN, which stays NaN; relative error below 2e-7. Cody-Waite
/// reduction by ln 2 and 1 + r + r^2 q(r), whose relative error is below 4e-9 for |r| <= ln(2) / 2.
inline float exp_in_range(float x) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * 1.44269504088896341F + kRound;
  const float n = shifted - kRound;
  float r = x - n * 0.693359375F;
  r = r + n * 2.12194440e-4F;
  float p = 1.3814539975e-3F;
  p = p * r + 8.3687452567e-3F;
  p = p * r + 4.1668390797e-2F;
  p = p * r + 1.6666520398e-1F;
  p = p * r + 4.9999993432e-1F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const std::int32_t exponent =
      std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRound);
  return p * std::bit_cast<float>((exponent + 127) << 23);
}
inline double exp_in_range(double x) { return std::exp(x); }
/// The same for any x: results saturate near 1e-38 and 3e38.
inline float exp(float x) {
  x = x < -87.0F ? -87.0F : x;
  return exp_in_range(x > 88.0F ? 88.0F : x);
}
inline double exp(double x) { return std::exp(x); }

/// tanh x for f32, relative error below 3e-7; NaN stays NaN. Near 0 a polynomial (Cephes' tanhf
/// coefficients), because 1 - 2 / (e^(2x) + 1) would cancel.
inline float tanh(float x) {
  const float z = x * x;
  float p = -5.70498872745e-3F;
  p = p * z + 2.06390887954e-2F;
  p = p * z - 5.37397155531e-2F;
  p = p * z + 1.33314422036e-1F;
  p = p * z - 3.33332819422e-1F;
  const float near = p * z * x + x;
  const float far = 1.0F - 2.0F / (exp(2.0F * x) + 1.0F);
  return z < 0.390625F ? near : far;
}
inline double tanh(double x) { return std::tanh(x); }

inline double load(const double* p) { return *p; }
inline float load(const float* p) { return *p; }
inline float load(const BFloat16* p) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(p->bits) << 16);
}
inline void store(double* p, double value) { *p = value; }
inline void store(float* p, float value) { *p = value; }
/// Rounds to nearest even without a branch; a NaN keeps its sign and upper bits and stays NaN.
inline void store(BFloat16* p, float value) {
  const auto u = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (u + 0x7fffU + ((u >> 16) & 1U)) >> 16;
  const std::uint32_t quiet = (u >> 16) | 0x40U;
  p->bits = static_cast<std::uint16_t>((u & 0x7fffffffU) > 0x7f800000U ? quiet : rounded);
}

TESSERA_CPU_END
