#include "core/base/dtype.h"

#include <fmt/format.h>

#include <array>

namespace tessera {

std::string_view dtype_name(DType dtype) {
  static constexpr std::array<std::string_view, 11> kNames = {
      "f64", "f32", "bf16", "f16", "i64", "i32", "i16", "i8", "u16", "u8", "bool"};
  const auto i = static_cast<std::size_t>(dtype);
  return i < kNames.size() ? kNames[i] : "unknown";
}

void throw_unexpected_dtype(DType expected, DType found) {
  throw InvalidArgument("expected dtype {}, got {}", expected, found);
}

void throw_not_computing(DType dtype, std::string_view what) {
  throw Unsupported("{} is not available for dtype {}; use f32, bf16 or f64", what,
                    dtype_name(dtype));
}

}  // namespace tessera

fmt::format_context::iterator fmt::formatter<tessera::DType>::format(
    tessera::DType dtype, fmt::format_context& ctx) const {
  return fmt::formatter<std::string_view>::format(tessera::dtype_name(dtype), ctx);
}
