#pragma once

#include <cstdint>

namespace tessera::kernels::cuda {

/// A block owns a row.
struct SamplingShape {
  static constexpr int kThreads = 512, kWarps = kThreads / 32;
  /// Digits of the radix selection of a key. Each thread has one sum per digit value, in 64 KB of
  /// shared memory.
  static constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;
  static_assert(kDigits == kWarps);
  static constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - 1;
};

}  // namespace tessera::kernels::cuda
