#pragma once

#include "core/base/rng.h"
#include "core/tensor.h"

namespace tessera::ops {

/// a + b, same shape and dtype: the residual addition. @grad a, b; keeps nothing
Tensor add(const Tensor& a, const Tensor& b);

/// Zeroes elements with probability p and scales the others by 1 / (1 - p).
///
/// @param p              in [0, 1); 0 returns x itself
/// @param key            random stream of this place in the model and step
/// @param first_element  number of x's first element in that stream: with the global sample number
///                       in it, a rank or micro-batch draws what the whole batch would have drawn
/// @param place          [3] i64 that says both instead, where x lies: see kernels::Dropout; may be
///                       undefined. Backward reads it again
/// @grad x; keeps nothing (the mask is drawn again)
Tensor dropout(const Tensor& x, float p, const RngKey& key, std::uint64_t first_element,
               const Tensor& place = {});

}  // namespace tessera::ops
