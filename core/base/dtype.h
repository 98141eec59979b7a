#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "core/base/error.h"

namespace tessera {

/// Element types. Kernels compute in F64, F32 and BF16; the others are stored, indexed or
/// converted.
enum class DType : std::uint8_t { F64, F32, BF16, F16, I64, I32, I16, I8, U16, U8, Bool };

/// bfloat16: the upper half of an IEEE binary32. Conversion rounds to nearest, ties to even.
struct BFloat16 {
  std::uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const bool nan = (u & 0x7fffffffU) > 0x7f800000U;
    bits = static_cast<std::uint16_t>(nan ? ((u >> 16) | 0x40U)
                                          : ((u + 0x7fffU + ((u >> 16) & 1U)) >> 16));
  }
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};
static_assert(sizeof(BFloat16) == 2);

constexpr std::size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::F64:
    case DType::I64:
      return 8;
    case DType::F32:
    case DType::I32:
      return 4;
    case DType::BF16:
    case DType::F16:
    case DType::I16:
    case DType::U16:
      return 2;
    case DType::I8:
    case DType::U8:
    case DType::Bool:
      return 1;
  }
  return 0;
}

/// Lower-case name as used in messages and configuration: "f32", "bf16", "i64", ...
std::string_view dtype_name(DType dtype);

/// True for F64, F32, BF16 and F16.
constexpr bool is_floating(DType dtype) { return dtype <= DType::F16; }

template <typename T>
constexpr DType dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, double>)
    return DType::F64;
  else if constexpr (std::is_same_v<U, float>)
    return DType::F32;
  else if constexpr (std::is_same_v<U, BFloat16>)
    return DType::BF16;
  else if constexpr (std::is_same_v<U, std::int64_t>)
    return DType::I64;
  else if constexpr (std::is_same_v<U, std::int32_t>)
    return DType::I32;
  else if constexpr (std::is_same_v<U, std::int16_t>)
    return DType::I16;
  else if constexpr (std::is_same_v<U, std::int8_t>)
    return DType::I8;
  else if constexpr (std::is_same_v<U, std::uint16_t>)
    return DType::U16;
  else if constexpr (std::is_same_v<U, std::uint8_t>)
    return DType::U8;
  else if constexpr (std::is_same_v<U, bool>)
    return DType::Bool;
  else
    static_assert(sizeof(U) == 0, "no DType for this type");
}

/// @throws InvalidArgument naming both
[[noreturn]] void throw_unexpected_dtype(DType expected, DType found);
/// @throws Unsupported naming `what` and the dtype
[[noreturn]] void throw_not_computing(DType dtype, std::string_view what);

/// Calls f(std::type_identity<T>{}) with T the computing type of dtype: double, float or BFloat16.
/// @throws Unsupported naming `what` for any other dtype
template <typename F>
decltype(auto) visit_floating(DType dtype, std::string_view what, F&& f) {
  switch (dtype) {
    case DType::F64:
      return f(std::type_identity<double>{});
    case DType::F32:
      return f(std::type_identity<float>{});
    case DType::BF16:
      return f(std::type_identity<BFloat16>{});
    default:
      throw_not_computing(dtype, what);
  }
}

/// The type in which reductions over T accumulate: double for double, else float.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace tessera

template <>
struct fmt::formatter<tessera::DType> : fmt::formatter<std::string_view> {
  fmt::format_context::iterator format(tessera::DType dtype, fmt::format_context& ctx) const;
};
