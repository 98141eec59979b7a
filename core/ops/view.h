#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// x with another shape of the same number of elements; shares storage. x contiguous. @grad x
Tensor reshape(const Tensor& x, const Shape& shape);

/// Elements [begin, begin + length) of the first dim; shares storage. @grad x
Tensor narrow_rows(const Tensor& x, std::int64_t begin, std::int64_t length);

}  // namespace tessera::ops
