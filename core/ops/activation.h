#pragma once

#include "core/tensor.h"

namespace tessera::ops {

/// GELU in its tanh form (Hugging Face's gelu_new), elementwise.
///
/// @param x  any shape, f64, f32 or bf16, contiguous
/// @return   shape and dtype of x
/// @grad     x; keeps x
/// Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
Tensor gelu(const Tensor& x);

}  // namespace tessera::ops
