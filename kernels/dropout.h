#pragma once

#include <cstdint>

#include "core/base/rng.h"
#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// y[i] = keep(i) ? x[i] / (1 - p) : 0, where keep(i) is true if the uniform draw number
/// first_sample * sample_elements + i of the stream (Dropout, step, place) of the seed is at least
/// p. So the mask does not depend on how a batch is split over ranks and micro-batches. It is never
/// stored: backward draws it again for the gradient. x and y same shape and dtype, contiguous; p in
/// [0, 1).
struct Dropout {
  TensorView x;
  GradientView y;
  float p = 0.0F;
  const RngStep* rng = nullptr;       ///< in the device's memory: see Context::rng_step()
  std::uint64_t place = 0;            ///< number of the layer
  std::uint64_t sample_elements = 0;  ///< elements of one row of the batch
};
void dropout(Context& context, const Dropout& args);

}  // namespace tessera::kernels
