#pragma once

#include <cstdint>

#include "core/base/rng.h"
#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// y[i] = keep(i) ? x[i] / (1 - p) : 0, where keep(i) is true if the uniform draw number
/// first_element + i of the stream is at least p. The mask is never stored: backward draws it
/// again, on the gradient. x and y same shape and dtype, contiguous; p in [0, 1).
/// place: optional, [3] i64 where x lies: key and stream of `key`, and first_element, instead of
/// these two, so that work that is captured draws other masks in every step.
struct Dropout {
  TensorView x;
  GradientView y;
  float p = 0.0F;
  RngKey key;
  std::uint64_t first_element = 0;
  TensorView place{};
};
/// As it lies in `place`.
struct DropoutPlace {
  RngKey key;
  std::uint64_t first_element = 0;
};
void dropout(Context& context, const Dropout& args);

}  // namespace tessera::kernels
