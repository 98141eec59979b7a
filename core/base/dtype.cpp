#include "core/base/dtype.h"

#include <fmt/format.h>

namespace tessera {

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::F64:
      return "f64";
    case DType::F32:
      return "f32";
    case DType::BF16:
      return "bf16";
    case DType::F16:
      return "f16";
    case DType::I64:
      return "i64";
    case DType::I32:
      return "i32";
    case DType::I16:
      return "i16";
    case DType::I8:
      return "i8";
    case DType::U16:
      return "u16";
    case DType::U8:
      return "u8";
    case DType::Bool:
      return "bool";
  }
  return "unknown";
}

}  // namespace tessera

fmt::format_context::iterator fmt::formatter<tessera::DType>::format(
    tessera::DType dtype, fmt::format_context& ctx) const {
  return fmt::formatter<std::string_view>::format(tessera::dtype_name(dtype), ctx);
}
