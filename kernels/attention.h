#pragma once

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// Maximum head_dim (D below) of the CUDA kernels.
inline constexpr std::int64_t kMostCudaHeadDim = 256;

/// Causal softmax attention in tiles with an online softmax; no Tq x Tk matrix is stored.
///
/// q              [B, Tq, H, D]; k, v  [B, Tk, Hkv, D] with H a multiple of Hkv, Tk >= Tq. Any
///                strides, last dim contiguous (so q, k, v may be windows of one packed buffer).
/// out            [B, Tq, H, D], any strides, last dim contiguous
/// log_sum_exp    [B, H, Tq] accumulator dtype, contiguous: log-sum-exp of a query's scaled scores;
///                optional in forward, required by backward
/// Query i attends to keys 0 to i + (Tk - Tq): with a cache of past keys, Tq counts the new tokens.
/// Matrix products and softmax accumulate in f32 (f64 for f64). On CUDA, D is at most
/// kMostCudaHeadDim, and for bf16 inputs, the softmax, its gradient, and each gradient before
/// accumulation are rounded to bf16. Sources: Dao et al. 2022, arXiv:2205.14135, algorithm 1;
/// Dao 2023, arXiv:2307.08691 (backward).
struct AttentionForward {
  TensorView q, k, v;
  TensorView out;
  TensorView log_sum_exp{};
  float scale = 1.0F;  ///< usually 1 / sqrt(D)
};
void attention_forward(Context& context, const AttentionForward& args);

/// grad_q, grad_k, grad_v have the shapes and dtype of q, k, v (any strides, last dim contiguous).
struct AttentionBackward {
  TensorView q, k, v, out, log_sum_exp;
  TensorView grad_out;
  GradientView grad_q, grad_k, grad_v;
  float scale = 1.0F;
};
void attention_backward(Context& context, const AttentionBackward& args);

}  // namespace tessera::kernels
