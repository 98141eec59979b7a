#pragma once

#include <cstdint>
#include <vector>

#include "core/ops/activation.h"
#include "core/tensor.h"

namespace tessera::ops {

/// How a weight matrix is stored. Some checkpoints hold [in, out], most [out, in].
enum class WeightLayout : std::uint8_t { InOut, OutIn };

/// Adds h b^T to columns [first, first + out) of a linear map's result.
struct LowRankTerm {
  Tensor h;  ///< [..., rank], dtype and leading dims of x, contiguous
  Tensor b;  ///< [out, rank], dtype of x
  std::int64_t first = 0;
};

/// y = x W + b + low-rank terms + residual over the last dim.
///
/// @param x       [..., in], f64, f32 or bf16, contiguous
/// @param weight  [in, out] (InOut) or [out, in] (OutIn), dtype of x
/// @param bias    [out], dtype of x, or undefined
/// @param terms   each is added to the result in its dtype
/// @param residual  [..., out], dtype of x, contiguous, or undefined: added before the result is
///   rounded
/// @return        [..., out], dtype of x; accumulates in f32 (f64 for f64)
/// @grad          x, weight, bias, residual, terms; keeps x if weight requires a gradient, weight,
///   and terms
/// @throws InvalidArgument on a shape, dtype or context that does not fit
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
              WeightLayout layout = WeightLayout::OutIn, const std::vector<LowRankTerm>& terms = {},
              const Tensor& residual = {});

/// y = (act(gate) * up) W + b + residual over the last dim, where gate = x[..., :in], up = x[..., in:]: the
/// second half of a gated MLP. Equals swiglu or geglu, then linear; one operation, so that backward
/// computes the product again instead of keeping it.
///
/// @param x       [..., 2 in], f64, f32 or bf16, contiguous
/// @param weight  [in, out] (InOut) or [out, in] (OutIn), dtype of x
/// @param bias    [out], dtype of x, or undefined
/// @param residual  as in linear()
/// @return        [..., out], dtype of x
/// @grad          x, weight, bias, residual; keeps x and weight
/// @throws InvalidArgument on a shape, dtype or context that does not fit
Tensor gated_linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                    WeightLayout layout = WeightLayout::OutIn, Gate gate = Gate::Silu,
                    const Tensor& residual = {});

/// y = gelu(x W_fc + b_fc) W_proj + b_proj + residual over the last dim: the MLP of a transformer block, GELU
/// in its tanh form. Equals linear, gelu, linear; one operation, so that a device can fuse GELU and
/// its gradient into the adjacent matmuls.
///
/// @param x            [..., in], f64, f32 or bf16, contiguous
/// @param fc_weight    [in, hidden] (InOut) or [hidden, in] (OutIn), dtype of x
/// @param fc_bias      [hidden], dtype of x, or undefined
/// @param proj_weight  [hidden, out] (InOut) or [out, hidden] (OutIn), dtype of x
/// @param proj_bias    [out], dtype of x, or undefined
/// @param residual     as in linear()
/// @return             [..., out], dtype of x
/// @grad               all six; keeps x, both weights, and input and output of GELU
/// @throws InvalidArgument on a shape, dtype or context that does not fit
Tensor gelu_mlp(const Tensor& x, const Tensor& fc_weight, const Tensor& fc_bias,
                const Tensor& proj_weight, const Tensor& proj_bias,
                WeightLayout layout = WeightLayout::OutIn, const Tensor& residual = {});

}  // namespace tessera::ops
