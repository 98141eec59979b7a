#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace tessera::ops {

/// a + b, same shape and dtype: the residual addition. @grad a, b; keeps nothing
Tensor add(const Tensor& a, const Tensor& b);

/// Zeroes elements with probability p and scales the others by 1 / (1 - p).
///
/// @param x      [B, ...], f64, f32 or bf16, contiguous; row 0 is sample rng_step()->first_sample
/// @param p      in [0, 1); 0 returns x itself
/// @param place  number of the layer; together with the context's rng_step() it fixes the mask,
///   however a batch is split over ranks and micro-batches
/// @grad x; keeps nothing: backward draws the mask again, so rng_step() must not change until then
Tensor dropout(const Tensor& x, float p, std::uint64_t place);

}  // namespace tessera::ops
