#pragma once

#include <type_traits>

#include "core/base/dtype.h"
#include "kernels/cpu/level.h"

TESSERA_CPU_BEGIN

/// Calls f(std::type_identity<T>{}) for f64, f32 and bf16; operations refuse all others. (This does
/// not throw, because CPU levels must not share fmt's templates.)
template <typename F>
void visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::F64:
      return f(std::type_identity<double>{});
    case DType::F32:
      return f(std::type_identity<float>{});
    case DType::BF16:
      return f(std::type_identity<BFloat16>{});
    default:
      return;
  }
}

constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

TESSERA_CPU_END
