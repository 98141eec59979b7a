#pragma once

#include <cstdint>

namespace tessera::kernels::cuda {

/// A block sums each part of fixed length, then one block adds the sums of the parts.
struct SumShape {
  static constexpr unsigned kThreads = 256, kFinalThreads = 1024;
  static constexpr std::int64_t kPart = 16384;

  static unsigned parts(std::int64_t n) { return static_cast<unsigned>((n + kPart - 1) / kPart); }
};

}  // namespace tessera::kernels::cuda
