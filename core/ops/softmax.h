#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// e^x / sum of e^x over the last dim.
///
/// @param x  [..., C], f64, f32 or bf16, contiguous; -inf gives 0, a row of -inf gives NaN
/// @return   shape and dtype of x; computes in f32 (f64 for f64)
/// @grad     x; keeps the result
/// @throws InvalidArgument without a dim, or on a dtype that does not fit
Tensor softmax(const Tensor& x);

/// Logarithm of softmax, without its loss of precision; otherwise as softmax.
Tensor log_softmax(const Tensor& x);

}  // namespace tessera::ops
