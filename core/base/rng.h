#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace tessera {

/// Philox4x32-10: four random 32-bit words as a pure function of a 128-bit counter and a 64-bit
/// key. The same on every device.
/// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
constexpr std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                  std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(product0)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

/// FNV-1a, for keys of random streams and to detect accidental changes, not forgeries.
constexpr std::uint64_t hash_text(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

/// Purpose of a random stream; separates the streams of one seed.
enum class RngPurpose : std::uint32_t {
  Init = 1,
  Dropout = 2,
  DataOrder = 3,
  Sampling = 4,
  Test = 5,
  Rounding = 6,
};

/// A random stream: draw i is a pure function of the key and i, so any rank, device or recomputed
/// forward pass sees the same numbers.
struct RngKey {
  std::uint64_t key = 0;     ///< seed mixed with purpose
  std::uint64_t stream = 0;  ///< upper half of the counter, e.g. step and layer mixed

  /// @param a, b  identify the stream within its purpose: (step, layer), (epoch, 0), (parameter, 0)
  static constexpr RngKey make(std::uint64_t seed, RngPurpose purpose, std::uint64_t a,
                               std::uint64_t b = 0) {
    const auto lo = [](std::uint64_t v) { return static_cast<std::uint32_t>(v); };
    const auto hi = [](std::uint64_t v) { return static_cast<std::uint32_t>(v >> 32); };
    const auto k = philox4x32({lo(a), hi(a), lo(b), hi(b)}, {lo(seed), hi(seed)});
    const auto p = static_cast<std::uint64_t>(purpose);
    return {(std::uint64_t{k[0]} | std::uint64_t{k[1]} << 32) ^ (p * 0x9E3779B97F4A7C15ULL),
            (std::uint64_t{k[2]} | std::uint64_t{k[3]} << 32) ^ p};
  }

  /// Words 4i .. 4i+3 of the stream.
  constexpr std::array<std::uint32_t, 4> words(std::uint64_t i) const {
    return philox4x32(
        {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(i >> 32),
         static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)},
        {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)});
  }
  constexpr std::uint32_t word(std::uint64_t i) const { return words(i / 4)[i % 4]; }
};

/// Identifies the random draws of one step. Stored in device memory, where kernels read it: see
/// Context::rng_step().
struct RngStep {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint64_t first_sample = 0;  ///< global sample number of row 0
};

/// Uniform in [0, 1) with 24 bits.
constexpr float uniform_from_bits(std::uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1.0p-24F;
}

/// Draw i of a standard normal stream (Box-Muller on words 2i and 2i+1).
inline float normal_at(const RngKey& key, std::uint64_t i) {
  const auto w = key.words(i / 2);
  const std::uint64_t lane = (i % 2) * 2;
  const double u1 = (static_cast<double>(w[lane]) + 1.0) * 0x1.0p-32;
  const double u2 = static_cast<double>(w[lane + 1]) * 0x1.0p-32;
  return static_cast<float>(std::sqrt(-2.0 * std::log(u1)) * std::cos(2.0 * std::numbers::pi * u2));
}

}  // namespace tessera
