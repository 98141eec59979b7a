#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// How a weight matrix is stored. GPT-2's checkpoints hold [in, out], most others [out, in].
enum class WeightLayout : std::uint8_t { InOut, OutIn };

/// y = x W + b over the last dim.
///
/// @param x       [..., in], f64, f32 or bf16, contiguous
/// @param weight  [in, out] (InOut) or [out, in] (OutIn), dtype of x
/// @param bias    [out], dtype of x, or undefined
/// @return        [..., out], dtype of x; accumulates in f32 (f64 for f64)
/// @grad          x, weight, bias; keeps x and weight
/// @throws InvalidArgument on a shape, dtype or context that does not fit
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
              WeightLayout layout = WeightLayout::OutIn);

}  // namespace tessera::ops
