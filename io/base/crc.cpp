#include "io/base/crc.h"

#include <fmt/format.h>
#include <isa-l/crc.h>
#include <isa-l/crc64.h>

#include <algorithm>
#include <array>
#include <charconv>

namespace tessera::io {
namespace {

/// Checksum of A followed by B: appending B multiplies A's remainder by x^(8 * bytes_b) over GF(2).
/// Reflected: the highest bit is the coefficient of x^0.
template <typename Word, Word kPolynomial>
Word combine(Word crc_a, Word crc_b, std::uint64_t bytes_b) {
  static constexpr Word kOne = Word{1} << (8 * sizeof(Word) - 1);
  static constexpr auto kMultiply = [](Word a, Word b) {
    Word product = 0;
    for (Word bit = kOne; bit != 0; bit >>= 1) {
      if (a & bit) product ^= b;
      b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
    }
    return product;
  };
  // x^(8 * 2^k) modulo the polynomial.
  static constexpr std::array<Word, 64> kPowers = [] {
    std::array<Word, 64> powers{kOne >> 8};
    for (std::size_t k = 1; k < powers.size(); ++k) {
      powers[k] = kMultiply(powers[k - 1], powers[k - 1]);
    }
    return powers;
  }();
  for (std::size_t k = 0; bytes_b != 0; bytes_b >>= 1, ++k) {
    if (bytes_b & 1) crc_a = kMultiply(kPowers[k], crc_a);
  }
  return crc_a ^ crc_b;
}

constexpr std::string_view kPrefix = "crc64:";

}  // namespace

std::uint64_t crc64(const void* data, std::size_t bytes, std::uint64_t crc) {
  return crc64_ecma_refl(crc, static_cast<const unsigned char*>(data), bytes);
}

std::uint64_t crc64_combine(std::uint64_t crc_a, std::uint64_t crc_b, std::uint64_t bytes_b) {
  return combine<std::uint64_t, 0xC96C5795D7870F42ULL>(crc_a, crc_b, bytes_b);
}

std::uint32_t crc32(const void* data, std::size_t bytes, std::uint32_t crc) {
  return crc32_gzip_refl(crc, static_cast<const unsigned char*>(data), bytes);
}

std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t bytes_b) {
  return combine<std::uint32_t, 0xEDB88320U>(crc_a, crc_b, bytes_b);
}

std::string format_checksum(std::uint64_t crc) { return fmt::format("{}{:016x}", kPrefix, crc); }

bool parse_checksum(std::string_view text, std::uint64_t& crc) {
  if (!text.starts_with(kPrefix) || text.size() != kPrefix.size() + 16) return false;
  const auto digits = text.substr(kPrefix.size());
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (!std::all_of(digits.begin(), digits.end(), is_digit)) return false;
  return std::from_chars(digits.data(), digits.data() + digits.size(), crc, 16).ec == std::errc{};
}

}  // namespace tessera::io
