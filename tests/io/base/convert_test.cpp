#include "io/base/convert.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

// By definition: sign * 2^(e - 25) * (1024 + f), or sign * 2^-24 * f if subnormal.
double f16_by_definition(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f, fraction = bits & 0x3ff;
  const double sign = (bits & 0x8000) ? -1 : 1;
  if (exponent == 31) {
    return fraction ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  }
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

template <typename To, typename From>
std::vector<To> convert(DType from, const std::vector<From>& in, DType to) {
  std::vector<To> out(in.size());
  convert_elements(from, in.data(), to, out.data(), static_cast<std::int64_t>(in.size()));
  return out;
}

TEST_CASE("every f16 converts exactly to f32") {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  const auto floats = convert<float>(DType::F16, all, DType::F32);
  const auto halves = convert<BFloat16>(DType::F16, all, DType::BF16);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double expected = f16_by_definition(all[i]);
    const auto bits = std::bit_cast<std::uint32_t>(floats[i]);
    CAPTURE(i);
    if (std::isnan(expected)) {
      CHECK(std::isnan(floats[i]));
      CHECK(std::isnan(static_cast<float>(halves[i])));
      CHECK((bits & 0x7fffff) == (i & 0x3ff) << 13);  // NaN payloads are kept
    } else if (static_cast<double>(floats[i]) != expected ||
               std::signbit(floats[i]) != std::signbit(expected) ||
               halves[i].bits != BFloat16(floats[i]).bits) {
      CHECK(static_cast<double>(floats[i]) == expected);
      CHECK(halves[i].bits == BFloat16(floats[i]).bits);
    }
  }
}

TEST_CASE("f32 and bf16 convert alike, at any length and alignment") {
  std::mt19937 random(1);
  std::vector<std::uint32_t> bits(4099);
  for (std::uint32_t& value : bits) value = static_cast<std::uint32_t>(random());
  bits[0] = 0x7f800001;  // a NaN whose upper half is infinity
  bits[1] = 0xff800000;
  bits[2] = 0x3f808000;  // ties
  bits[3] = 0x3f818000;
  std::vector<char> in(bits.size() * 4 + 3), out(bits.size() * 4 + 3);
  for (std::size_t n = 0; n < bits.size(); n = n * 2 + 1) {
    for (std::size_t shift = 0; shift < 4; ++shift) {
      std::memcpy(in.data() + shift, bits.data(), n * 4);
      convert_elements(DType::F32, in.data() + shift, DType::BF16, out.data() + 3 - shift,
                       static_cast<std::int64_t>(n));
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < n; ++i) {
        BFloat16 value;
        std::memcpy(&value, out.data() + 3 - shift + i * 2, 2);
        wrong += value.bits != BFloat16(std::bit_cast<float>(bits[i])).bits;
      }
      CHECK(wrong == 0);
      convert_elements(DType::BF16, in.data() + shift, DType::F32, out.data() + 3 - shift,
                       static_cast<std::int64_t>(n));
      for (std::size_t i = 0; i < n; ++i) {
        std::uint16_t from = 0;
        std::uint32_t to = 0;
        std::memcpy(&from, in.data() + shift + i * 2, 2);
        std::memcpy(&to, out.data() + 3 - shift + i * 4, 4);
        wrong += to != std::uint32_t{from} << 16;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("f64 is rounded once") {
  // Next to a tie of bf16, by less than f32's precision: rounding twice would go to the even side.
  const double tie = 1 + 0x1p-8;
  const std::vector<double> values = {
      tie,    tie + 0x1p-40, tie - 0x1p-40, -tie - 0x1p-40, 3 * 0x1p-9, 1e300,   -1e300,
      1e-300, 3.3961776e38,  0.0,           -0.0,           0x1p-140,   1.0 / 3, std::nan("")};
  const auto halves = convert<BFloat16>(DType::F64, values, DType::BF16);
  const auto at = [&](std::size_t i) { return static_cast<float>(halves[i]); };
  CHECK(at(0) == 1.0F);
  CHECK(at(1) == 1.0F + 0x1p-7F);
  CHECK(at(2) == 1.0F);
  CHECK(at(3) == -1.0F - 0x1p-7F);
  CHECK(at(4) == 3 * 0x1p-9F);
  CHECK(std::isinf(at(5)));
  CHECK(at(6) == -std::numeric_limits<float>::infinity());
  CHECK(at(7) == 0.0F);
  CHECK(std::isinf(at(8)));  // beyond the largest bf16 by more than half a step
  CHECK(halves[9].bits == 0);
  CHECK(halves[10].bits == 0x8000);
  CHECK(std::isnan(at(13)));
  const auto floats = convert<float>(DType::F64, values, DType::F32);
  for (std::size_t i = 0; i + 1 < values.size(); ++i) {
    CHECK(floats[i] == static_cast<float>(values[i]));
  }
}

TEST_CASE("f32 and f64 convert to the nearest f16, ties to even") {
  // Between neighbours a < b, the middle goes to the even one, and its neighbours to a and b.
  for (std::uint16_t bits = 0; bits < 0x7c00; ++bits) {
    const double a = f16_by_definition(bits);
    const double b =
        bits == 0x7bff ? 65536 : f16_by_definition(static_cast<std::uint16_t>(bits + 1));
    const auto middle = static_cast<float>((a + b) / 2);
    const std::vector<float> values{static_cast<float>(a), std::nextafter(middle, 0.0F), middle,
                                    std::nextafter(middle, 1e9F), -middle};
    const auto even = static_cast<std::uint16_t>(bits + (bits & 1));
    const auto next = static_cast<std::uint16_t>(bits + 1);
    const std::vector<std::uint16_t> expected{bits, bits, even, next,
                                              static_cast<std::uint16_t>(even | 0x8000)};
    const auto found = convert<std::uint16_t>(DType::F32, values, DType::F16);
    if (found != expected) {
      CAPTURE(bits);
      CHECK(found == expected);
    }
    // Rounding to f32 first would make this the middle.
    const std::vector<double> wide{(a + b) / 2 * (1 + 1e-15), (a + b) / 2 * (1 - 1e-15)};
    const auto from_wide = convert<std::uint16_t>(DType::F64, wide, DType::F16);
    if (from_wide[0] != next || from_wide[1] != bits) {
      CAPTURE(bits);
      CHECK(from_wide[0] == next);
      CHECK(from_wide[1] == bits);
    }
  }
  const auto special = convert<std::uint16_t>(
      DType::F32, std::vector<float>{70'000, -1e30F, INFINITY, std::nanf(""), 1e-30F, -0.0F},
      DType::F16);
  CHECK(special[0] == 0x7c00);
  CHECK(special[1] == 0xfc00);
  CHECK(special[2] == 0x7c00);
  CHECK((special[3] & 0x7fff) > 0x7c00);
  CHECK(special[4] == 0);
  CHECK(special[5] == 0x8000);
}

TEST_CASE("unsupported conversions are refused by name") {
  const std::int64_t value = 1;
  float out = 0;
  CHECK_THROWS_HOLDING(Unsupported, "cannot convert i64 to f32",
                       convert_elements(DType::I64, &value, DType::F32, &out, 1));
  CHECK_FALSE(can_convert(DType::F32, DType::F64));
  CHECK_FALSE(can_convert(DType::I16, DType::F16));
  CHECK(can_convert(DType::I8, DType::I8));
}

}  // namespace
}  // namespace tessera::io
