#include "io/base/crc64.h"

#include <fmt/format.h>
#include <isa-l/crc64.h>

#include <algorithm>
#include <array>
#include <charconv>

namespace tessera::io {
namespace {

// Reflected: bit 63 is the coefficient of x^0, bit 0 that of x^63.
constexpr std::uint64_t kPolynomial = 0xC96C5795D7870F42ULL;
constexpr std::uint64_t kOne = std::uint64_t{1} << 63;

constexpr std::uint64_t multiply(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  for (std::uint64_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// kPowers[k] = x^(8 * 2^k) modulo the polynomial.
constexpr std::array<std::uint64_t, 64> kPowers = [] {
  std::array<std::uint64_t, 64> powers{};
  powers[0] = kOne >> 8;
  for (std::size_t k = 1; k < powers.size(); ++k) {
    powers[k] = multiply(powers[k - 1], powers[k - 1]);
  }
  return powers;
}();

constexpr std::string_view kPrefix = "crc64:";

}  // namespace

std::uint64_t crc64(const void* data, std::size_t bytes, std::uint64_t crc) {
  return crc64_ecma_refl(crc, static_cast<const unsigned char*>(data), bytes);
}

std::uint64_t crc64_combine(std::uint64_t crc_a, std::uint64_t crc_b, std::uint64_t bytes_b) {
  for (std::size_t k = 0; bytes_b != 0; bytes_b >>= 1, ++k) {
    if (bytes_b & 1) crc_a = multiply(kPowers[k], crc_a);
  }
  return crc_a ^ crc_b;
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
