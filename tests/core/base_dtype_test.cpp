#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "core/base/dtype.h"

namespace tessera {
namespace {

float round_trip(float value) { return static_cast<float>(BFloat16(value)); }

TEST_CASE("dtypes have sizes and names") {
  struct Row {
    DType dtype;
    std::size_t size;
    std::string_view name;
    bool floating;
  };
  const Row rows[] = {
      {DType::F64, 8, "f64", true},  {DType::F32, 4, "f32", true},   {DType::BF16, 2, "bf16", true},
      {DType::F16, 2, "f16", true},  {DType::I64, 8, "i64", false},  {DType::I32, 4, "i32", false},
      {DType::I16, 2, "i16", false}, {DType::I8, 1, "i8", false},    {DType::U16, 2, "u16", false},
      {DType::U8, 1, "u8", false},   {DType::Bool, 1, "bool", false}};
  for (const Row& row : rows) {
    CAPTURE(row.name);
    CHECK(dtype_size(row.dtype) == row.size);
    CHECK(dtype_name(row.dtype) == row.name);
    CHECK(is_floating(row.dtype) == row.floating);
    CHECK(fmt::format("<{:>5}>", row.dtype) == fmt::format("<{:>5}>", row.name));
  }
}

TEST_CASE("C++ types map to dtypes") {
  CHECK(dtype_of<double>() == DType::F64);
  CHECK(dtype_of<const float>() == DType::F32);
  CHECK(dtype_of<BFloat16>() == DType::BF16);
  CHECK(dtype_of<std::int32_t>() == DType::I32);
  CHECK(dtype_of<std::uint16_t>() == DType::U16);
  CHECK(dtype_of<bool>() == DType::Bool);
}

TEST_CASE("bf16 rounds to nearest, ties to even") {
  const float ulp = 0x1.0p-7F;  // spacing of bf16 in [1, 2)
  CHECK(round_trip(1.0F) == 1.0F);
  CHECK(round_trip(1.0F + 0.49F * ulp) == 1.0F);
  CHECK(round_trip(1.0F + 0.51F * ulp) == 1.0F + ulp);
  CHECK(round_trip(1.0F + 0.5F * ulp) == 1.0F);
  CHECK(round_trip(1.0F + 1.5F * ulp) == 1.0F + 2.0F * ulp);
  CHECK(round_trip(-1.0F - 1.5F * ulp) == -1.0F - 2.0F * ulp);
  CHECK(BFloat16(-0.0F).bits == 0x8000);
}

TEST_CASE("bf16 keeps infinities and NaN, and overflows to infinity") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(round_trip(infinity) == infinity);
  CHECK(round_trip(-infinity) == -infinity);
  CHECK(round_trip(std::numeric_limits<float>::max()) == infinity);
  CHECK(std::isnan(round_trip(std::numeric_limits<float>::quiet_NaN())));
  // The NaN payload lies in the truncated bits.
  CHECK(std::isnan(round_trip(std::bit_cast<float>(0x7f800001U))));
  CHECK(std::isnan(round_trip(std::bit_cast<float>(0xffffffffU))));
}

TEST_CASE("every bf16 survives conversion to float and back") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    BFloat16 value{};
    value.bits = static_cast<std::uint16_t>(bits);
    const auto single = static_cast<float>(value);
    if (!std::isnan(single)) wrong += BFloat16(single).bits != value.bits;
  }
  CHECK(wrong == 0);
}

TEST_CASE("visit_floating passes the compute type and refuses other dtypes") {
  const auto size = [](auto type) { return sizeof(typename decltype(type)::type); };
  CHECK(visit_floating(DType::F64, "test", size) == 8);
  CHECK(visit_floating(DType::F32, "test", size) == 4);
  CHECK(visit_floating(DType::BF16, "test", size) == 2);
  CHECK_THROWS_WITH_AS(visit_floating(DType::I32, "softmax", size),
                       "softmax is not available for dtype i32; use f32, bf16 or f64", Unsupported);
  CHECK_THROWS_AS(visit_floating(DType::F16, "softmax", size), Unsupported);
}

}  // namespace
}  // namespace tessera
