#pragma once

#include <cstdint>

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// y = condition != 0 ? a : b (+= if y.accumulate), elementwise.
///
/// condition  i32, any strides; 0 repeats an element, also of a and b
/// a, b       f64, f32, bf16, or i32 without accumulation; undefined: a_value or b_value everywhere
/// y          shape of condition, dtype of a and b
struct Where {
  TensorView condition, a, b;
  GradientView y;
  double a_value = 0.0, b_value = 0.0;
};
void where(Context& context, const Where& args);

enum class CompareKind : std::uint8_t { Equal, NotEqual, Less, LessEqual };

/// y = 1 where kind(a, b) holds, else 0. NaN is equal to nothing, and neither less nor greater.
///
/// a, b  f64, f32, bf16 or i32, of one dtype, any strides; b undefined: b_value
/// y     i32, shape of a
struct Compare {
  TensorView a, b, y;
  CompareKind kind = CompareKind::Equal;
  double b_value = 0.0;
  bool swapped = false;  ///< kind(b, a)
};
void compare(Context& context, const Compare& args);

}  // namespace tessera::kernels
