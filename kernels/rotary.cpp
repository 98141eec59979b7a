#include "kernels/rotary.h"

#include <cmath>

#include "kernels/checks.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(rotary, Rotary)

void rotary(Context& context, const Rotary& args) {
  if (!args.y) return;
  constexpr auto kName = "rotary";
  // In f64, an angle of so many radians is exact to a millionth.
  constexpr std::int64_t kMostPositions = std::int64_t{1} << 31;
  const TensorView &x = args.x, &y = args.y.view;
  check_computing_dtype(kName, "x", x);
  check_dims(kName, "x", x, 4);
  check_device(kName, "x", context, x);
  check_device(kName, "y", context, y);
  check_dtype(kName, "y", y, x.dtype);
  check_shape(kName, "y", y, x.shape);
  require(x.shape[3] > 0 && x.shape[3] % 2 == 0,
          "rotary: the last dim of x is rotated in pairs and must be even, got shape {}", x.shape);
  require(x.strides[3] == 1 && y.strides[3] == 1,
          "rotary: the last dim of x and y must be contiguous, got strides {} and {}", x.strides,
          y.strides);
  require(std::isfinite(args.base) && args.base >= 1.0, "rotary: base must be 1 or more, got {}",
          args.base);
  require(args.first_position >= 0 && args.first_position <= kMostPositions - x.shape[1],
          "rotary: positions [{}, {} + {}) must lie in [0, {})", args.first_position,
          args.first_position, x.shape[1], kMostPositions);
  require(args.copied_heads >= 0 && args.copied_heads <= x.shape[2],
          "rotary: copied_heads must be in [0, {}], got {}", x.shape[2], args.copied_heads);
  if (x.numel() == 0) return;
  TESSERA_DISPATCH(rotary, context, args);
}

}  // namespace tessera::kernels
