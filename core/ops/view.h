#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// x with another shape of the same number of elements; shares storage. x contiguous. @grad x
Tensor reshape(const Tensor& x, const Shape& shape);

}  // namespace tessera::ops
