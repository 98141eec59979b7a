#pragma once

#include "core/base/rng.h"
#include "kernels/cuda/device/platform.h"

namespace tessera::kernels::cuda {

/// Draws words number to number + N - 1 of a stream. A counter yields four words, so N / 4 counters are needed if
/// `number` is a multiple of 4, else up to one more. Array indices are constants, so that words stay in registers.
template <int N>
__device__ __forceinline__ void draw(const RngKey& key, std::uint64_t number,
                                     std::uint32_t (&words)[N]) {
  const int skip = static_cast<int>(number % 4);
  if (N % 4 == 0 && skip == 0) {
    for (int group = 0; group < N / 4; ++group) {
      const auto four = key.words(number / 4 + static_cast<std::uint64_t>(group));
      for (int i = 0; i < 4; ++i) words[4 * group + i] = four[static_cast<std::size_t>(i)];
    }
    return;
  }
  constexpr int kGroups = (N + 6) / 4;
  std::uint32_t all[4 * kGroups + 3] = {};
  for (int group = 0; group < kGroups; ++group) {
    if (4 * group >= skip + N) break;
    const auto four = key.words(number / 4 + static_cast<std::uint64_t>(group));
    for (int i = 0; i < 4; ++i) all[4 * group + i] = four[static_cast<std::size_t>(i)];
  }
  for (int k = 0; k < N; ++k) {
    const std::uint32_t low = skip % 2 == 0 ? all[k] : all[k + 1];
    const std::uint32_t high = skip % 2 == 0 ? all[k + 2] : all[k + 3];
    words[k] = skip < 2 ? low : high;
  }
}

}  // namespace tessera::kernels::cuda
