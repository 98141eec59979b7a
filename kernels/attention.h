#pragma once

#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// Maximum head_dim (D below) of the CUDA kernels.
inline constexpr std::int64_t kMostCudaHeadDim = 256;

/// Keys that a query sees, and the cap of scores; by default plain causal attention. Query i stands
/// at the position of key i + (Tk - Tq): with a cache of past keys, Tq counts the new tokens. Every
/// query must see a key.
struct AttentionVariant {
  bool causal = true;       ///< no key after the query; else every key, for any Tq and Tk
  std::int64_t window = 0;  ///< with causal: the last `window` keys up to the query; 0: all of them
  float softcap = 0.0F;     ///< > 0: a scaled score s becomes softcap * tanh(s / softcap)
  TensorView documents{};   ///< i32 [B, Tk], last dim contiguous: ids of keys and, by position, of
                            ///< queries; keys of other ids are hidden. Undefined: one document

  /// Plain causal attention, which the fastest kernels are restricted to.
  bool is_causal_only() const {
    return causal && window == 0 && !(softcap > 0.0F) && !documents.defined();
  }
};

/// Softmax attention in tiles with an online softmax; no Tq x Tk matrix is stored, and tiles of
/// scores outside of the window are skipped.
///
/// q              [B, Tq, H, D]; k, v  [B, Tk, Hkv, D] with H a multiple of Hkv; Tk >= Tq if causal
///                or with documents. Any strides, last dim contiguous (so q, k, v may be windows of
///                one packed buffer).
/// out            [B, Tq, H, D], any strides, last dim contiguous
/// log_sum_exp    [B, H, Tq] accumulator dtype, contiguous: log-sum-exp of a query's scaled and
///                capped scores; optional in forward, required by backward
/// Matrix products and softmax accumulate in f32 (f64 for f64). On CUDA, D is at most
/// kMostCudaHeadDim. For bf16 inputs the softmax and its gradient are rounded to bf16 on CPUs with
/// AVX512-BF16 (forward: of more than 4 queries) and on tensor cores (plain causal attention), where each gradient
/// is rounded before accumulation, too. Sources: Dao et al. 2022, arXiv:2205.14135, algorithm 1;
/// Dao 2023, arXiv:2307.08691 (backward); Gemma Team 2024, arXiv:2408.00118, section 2 (cap); Jiang et
/// al. 2023, arXiv:2310.06825, section 2 (window).
struct AttentionForward {
  TensorView q, k, v;
  TensorView out;
  TensorView log_sum_exp{};
  float scale = 1.0F;  ///< positive, usually 1 / sqrt(D)
  AttentionVariant variant{};
};
void attention_forward(Context& context, const AttentionForward& args);

/// grad_q, grad_k, grad_v have the shapes and dtype of q, k, v (any strides, last dim contiguous).
struct AttentionBackward {
  TensorView q, k, v, out, log_sum_exp;
  TensorView grad_out;
  GradientView grad_q, grad_k, grad_v;
  float scale = 1.0F;
  AttentionVariant variant{};
};
void attention_backward(Context& context, const AttentionBackward& args);

}  // namespace tessera::kernels
