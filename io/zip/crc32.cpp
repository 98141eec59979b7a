#include "io/zip/crc32.h"

#include <isa-l/crc.h>

#include <array>

namespace tessera::io {
namespace {

// Reflected: bit 31 is the coefficient of x^0, bit 0 that of x^31.
constexpr std::uint32_t kPolynomial = 0xEDB88320U;
constexpr std::uint32_t kOne = std::uint32_t{1} << 31;

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// kPowers[k] = x^(8 * 2^k) modulo the polynomial.
constexpr std::array<std::uint32_t, 64> kPowers = [] {
  std::array<std::uint32_t, 64> powers{};
  powers[0] = kOne >> 8;
  for (std::size_t k = 1; k < powers.size(); ++k) {
    powers[k] = multiply(powers[k - 1], powers[k - 1]);
  }
  return powers;
}();

}  // namespace

std::uint32_t crc32(const void* data, std::size_t bytes, std::uint32_t crc) {
  return crc32_gzip_refl(crc, static_cast<const unsigned char*>(data), bytes);
}

std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t bytes_b) {
  for (std::size_t k = 0; bytes_b != 0; bytes_b >>= 1, ++k) {
    if (bytes_b & 1) crc_a = multiply(kPowers[k], crc_a);
  }
  return crc_a ^ crc_b;
}

}  // namespace tessera::io
