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

/// Activation of a gated MLP: SiLU (SwiGLU), or GELU in its tanh form (GeGLU).
enum class Gate : std::uint8_t { Silu, Gelu };

/// SwiGLU of a packed projection: y = silu(gate) * up, where gate = x[..., :H], up = x[..., H:].
///
/// @param x  [..., 2 H], f64, f32 or bf16, contiguous
/// @return   [..., H], dtype of x
/// @grad     x; keeps x
/// @throws InvalidArgument if the last dim is odd, or on a dtype that does not fit
/// Source: Shazeer 2020, arXiv:2002.05202, eq. 5.
Tensor swiglu(const Tensor& x);

/// GeGLU of a packed projection: y = gelu(gate) * up with the tanh form of GELU; otherwise as
/// swiglu.
Tensor geglu(const Tensor& x);

}  // namespace tessera::ops
