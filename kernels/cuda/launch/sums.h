#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::kernels::cuda {

/// A block sums each part of fixed length, then one block adds the sums of the parts.
struct SumShape {
  static constexpr unsigned kThreads = 256, kFinalThreads = 1024;
  static constexpr std::int64_t kPart = 16384;

  static unsigned parts(std::int64_t n) { return static_cast<unsigned>((n + kPart - 1) / kPart); }
  static std::size_t scratch_bytes(std::int64_t n) { return parts(n) * sizeof(double); }
};

}  // namespace tessera::kernels::cuda
