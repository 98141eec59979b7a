#include <doctest/doctest.h>

#include <set>

#include "core/base/rng.h"

namespace tessera {
namespace {

using Words = std::array<std::uint32_t, 4>;

// Known answers of Random123's kat_vectors file, philox4x32 with 10 rounds.
static_assert(philox4x32({0, 0, 0, 0}, {0, 0}) ==
              Words{0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U});
static_assert(philox4x32({0xffffffffU, 0xffffffffU, 0xffffffffU, 0xffffffffU},
                         {0xffffffffU, 0xffffffffU}) ==
              Words{0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU});
static_assert(philox4x32({0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U},
                         {0xa4093822U, 0x299f31d0U}) ==
              Words{0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U});

TEST_CASE("a stream's words are the concatenation of its blocks") {
  const RngKey key = RngKey::make(1, RngPurpose::Test, 2, 3);
  for (const std::uint64_t block : {std::uint64_t{0}, std::uint64_t{7}, std::uint64_t{1} << 40}) {
    const Words words = key.words(block);
    for (std::uint64_t i = 0; i < 4; ++i) CHECK(key.word(4 * block + i) == words[i]);
  }
}

TEST_CASE("seed, purpose and both names change the stream") {
  std::set<std::uint64_t> seen;
  const auto add = [&](const RngKey& key) {
    seen.insert(std::uint64_t{key.word(0)} << 32 | key.word(1));
  };
  std::size_t count = 0;
  for (const std::uint64_t seed : {0ULL, 1ULL, 1ULL << 32}) {
    for (const RngPurpose purpose : {RngPurpose::Init, RngPurpose::Dropout, RngPurpose::Sampling}) {
      for (const std::uint64_t a : {0ULL, 1ULL, 1ULL << 32}) {
        for (const std::uint64_t b : {0ULL, 1ULL, 1ULL << 32}) {
          add(RngKey::make(seed, purpose, a, b));
          ++count;
        }
      }
    }
  }
  CHECK(seen.size() == count);
  const RngKey key = RngKey::make(5, RngPurpose::Init, 6, 7);
  CHECK(key.word(9) == RngKey::make(5, RngPurpose::Init, 6, 7).word(9));
}

TEST_CASE("uniform numbers lie in [0, 1) and are evenly distributed") {
  CHECK(uniform_from_bits(0) == 0.0F);
  CHECK(uniform_from_bits(0xffffffffU) < 1.0F);
  CHECK(uniform_from_bits(0x80000000U) == 0.5F);
  const RngKey key = RngKey::make(3, RngPurpose::Test, 0);
  constexpr int kDraws = 64000;
  std::array<int, 16> bins{};
  for (std::uint64_t i = 0; i < kDraws; ++i)
    ++bins[static_cast<std::size_t>(uniform_from_bits(key.word(i)) * 16.0F)];
  double chi_square = 0;
  for (const int bin : bins) chi_square += (bin - 4000.0) * (bin - 4000.0) / 4000.0;
  CHECK(chi_square < 37.7);  // 15 degrees of freedom, p = 0.001
}

TEST_CASE("normal numbers have the moments of a standard normal") {
  const RngKey key = RngKey::make(4, RngPurpose::Test, 0);
  constexpr int kDraws = 50000;
  double sum = 0, squares = 0, fourth = 0;
  for (std::uint64_t i = 0; i < kDraws; ++i) {
    const auto x = static_cast<double>(normal_at(key, i));
    CHECK_FALSE(!std::isfinite(x));
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  CHECK(std::abs(sum / kDraws) < 4.0 / std::sqrt(kDraws));
  CHECK(std::abs(squares / kDraws - 1.0) < 4.0 * std::sqrt(2.0 / kDraws));
  CHECK(std::abs(fourth / kDraws - 3.0) < 4.0 * std::sqrt(96.0 / kDraws));
  CHECK(normal_at(key, 123) == normal_at(key, 123));
}

}  // namespace
}  // namespace tessera
