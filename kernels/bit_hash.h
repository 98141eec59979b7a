#pragma once

#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// hash = sum over words of mix(word, its position), mod 2^64: the same on all devices and for any
/// number of threads; a changed bit changes it.
///
/// x     any dtype, contiguous, aligned to 4 bytes, read as words of 8 bytes; the last one is padded
///       with zeros
/// hash  one element, i64
/// The host does not wait for the device. Mixer: Steele et al. 2014, "Fast splittable pseudorandom
/// number generators" (SplitMix64).
struct BitHash {
  TensorView x, hash;
  std::uint64_t first_position = 0;  ///< of the first word
  bool accumulate = false;           ///< hash += instead of hash =
};
void bit_hash(Context& context, const BitHash& args);

/// The mixer, a bijection of `word` for each position.
constexpr std::uint64_t mix_bits(std::uint64_t word, std::uint64_t position) {
  std::uint64_t z = word + (position + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace tessera::kernels
