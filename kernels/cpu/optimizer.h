#pragma once

#include <cstdint>

namespace tessera::kernels::cpu {

/// Elements whose squares are summed to one float64, whatever the number of threads.
inline constexpr std::int64_t kSumBlock = 16384;

/// partials[i] = sum of the squares of x[i * kSumBlock .. (i + 1) * kSumBlock), cut at n.
struct SumOfSquares {
  const float* x;
  std::int64_t n;
  double* partials;
};

}  // namespace tessera::kernels::cpu
