#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace tessera::ops {

/// Rotary position embedding: in every head of width D, rotates the pair (i, i + D/2) by the angle
/// position * base^(-2 i / D); token t has position first_position + t.
///
/// @param x     [B, T, H, D] of any number of heads, f64, f32 or bf16, contiguous; D even
/// @param base  1 or more; 10000 in the source
/// @return      shape and dtype of x
/// @grad        x; keeps nothing
/// @throws InvalidArgument on a shape, dtype or position that does not fit
/// Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2; pairs as in Hugging Face's Llama.
Tensor rotary(const Tensor& x, double base, std::int64_t first_position = 0);

/// The same for queries and keys of a packed projection; values are copied.
///
/// @param qkv        [B, T, (H + 2 Hkv) * D]: heads of queries, keys and values side by side,
///                   contiguous
/// @param n_head     H, heads of queries
/// @param n_kv_head  Hkv, heads of keys and of values
/// @return           shape and dtype of qkv
Tensor rotary_packed(const Tensor& qkv, std::int64_t n_head, std::int64_t n_kv_head, double base,
                     std::int64_t first_position = 0);

}  // namespace tessera::ops
