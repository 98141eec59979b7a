#pragma once

#include "core/base/context.h"
#include "core/base/tensor_view.h"

namespace tessera::kernels {

/// The most D that kernels of CUDA take.
inline constexpr std::int64_t kMostCudaHeadDim = 256;

/// Causal softmax attention in tiles with an online softmax; no Tq x Tk matrix is stored.
///
/// q              [B, Tq, H, D]
/// k, v           [B, Tk, Hkv, D] with H a multiple of Hkv, Tk >= Tq. q, k, v have any strides,
///                last dim contiguous (they may be windows of one packed buffer).
/// out            [B, Tq, H, D], strides free, last dim contiguous
/// log_sum_exp    [B, H, Tq] accumulator dtype, contiguous; of the scaled scores; may be undefined
///                in forward when no backward follows
/// Query i sees keys 0 .. i + (Tk - Tq): with a cache of past keys, Tq is the number of new tokens.
/// Products and softmax accumulate in f32 (f64 for f64). On CUDA, D is at most kMostCudaHeadDim,
/// and in bf16 the softmax, its gradient, and a gradient before it is accumulated are rounded to
/// bf16.
/// Source: Dao et al. 2022, arXiv:2205.14135, algorithm 1; backward after
/// Dao 2023, arXiv:2307.08691.
struct AttentionForward {
  TensorView q, k, v;
  TensorView out;
  TensorView log_sum_exp{};
  float scale = 1.0F;  ///< usually 1 / sqrt(D)
};
void attention_forward(Context& context, const AttentionForward& args);

/// grad_q, grad_k, grad_v have the shapes and dtype of q, k, v (any strides, last dim contiguous)
/// and honour accumulate.
struct AttentionBackward {
  TensorView q, k, v, out, log_sum_exp;
  TensorView grad_out;
  GradientView grad_q, grad_k, grad_v;
  float scale = 1.0F;
};
void attention_backward(Context& context, const AttentionBackward& args);

}  // namespace tessera::kernels
