#pragma once

#include <cstdint>

#include "core/base/rng.h"
#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// y[i] = u(i) >= p ? x[i] / (1 - p) : 0. u(i) is the uniform random number first_sample *
/// sample_elements + i of the stream (Dropout, step, place) of the seed, so that the mask does not
/// depend on how a batch is split over ranks and micro-batches. The mask is not stored: backward
/// draws it again. x and y have the same shape and dtype, contiguous; p in [0, 1).
struct Dropout {
  TensorView x;
  GradientView y;
  float p = 0.0F;
  const RngStep* rng = nullptr;       ///< in device memory, see Context::rng_step()
  std::uint64_t place = 0;            ///< number of the dropout layer in the model
  std::uint64_t sample_elements = 0;  ///< elements per sample of the batch
};
void dropout(Context& context, const Dropout& args);

}  // namespace tessera::kernels
