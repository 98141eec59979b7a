#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace tessera::ops {

// Arithmetic of two tensors with NumPy's broadcasting: shapes are aligned at the last dim; missing
// dims and dims of size 1 are repeated. Operators +, -, * and / are the same functions.
//
// @param a, b  f64, f32 or bf16, of one dtype, any strides
// @return      dense, of the broadcast shape and that dtype; computes in f32 (f64 for f64)
// @throws InvalidArgument on shapes that cannot be broadcast, a dtype or context that does not fit

/// a + b. @grad a, b; keeps nothing
Tensor add(const Tensor& a, const Tensor& b);
/// a - b. @grad a, b; keeps nothing
Tensor sub(const Tensor& a, const Tensor& b);
/// a * b. @grad a, b; keeps the factor of each input that requires a gradient
Tensor mul(const Tensor& a, const Tensor& b);
/// a / b. @grad a, b; keeps b, and the result if b requires a gradient
Tensor div(const Tensor& a, const Tensor& b);

// The same with a number, which is rounded to f32 (f64 for f64). @grad the tensor; div(a, x) keeps x

Tensor add(const Tensor& x, double b);
Tensor sub(const Tensor& x, double b);
Tensor sub(double a, const Tensor& x);
Tensor mul(const Tensor& x, double b);
Tensor div(const Tensor& x, double b);
Tensor div(double a, const Tensor& x);
/// -x. @grad x; keeps nothing
Tensor neg(const Tensor& x);

/// x in another dtype, e.g. to add a mean in bf16 to a loss in f32.
///
/// @param x      f64, f32 or bf16, contiguous
/// @param dtype  f64, f32 or bf16; that of x returns x itself
/// @return       shape of x; rounds to nearest even
/// @grad         x; keeps nothing
/// @throws InvalidArgument on another dtype
Tensor cast(const Tensor& x, DType dtype);

/// Zeroes elements with probability p and scales the others by 1 / (1 - p).
///
/// @param x      [B, ...], f64, f32 or bf16, contiguous; row 0 is sample rng_step()->first_sample
/// @param p      in [0, 1); 0 returns x itself
/// @param place  number of the layer; together with the context's rng_step() it fixes the mask,
///   however a batch is split over ranks and micro-batches
/// @grad x; keeps nothing: backward draws the mask again, so rng_step() must not change until then
Tensor dropout(const Tensor& x, float p, std::uint64_t place);

}  // namespace tessera::ops

namespace tessera {

// Operators of tensors; see ops::add and the functions below it.

inline Tensor operator+(const Tensor& a, const Tensor& b) { return ops::add(a, b); }
inline Tensor operator-(const Tensor& a, const Tensor& b) { return ops::sub(a, b); }
inline Tensor operator*(const Tensor& a, const Tensor& b) { return ops::mul(a, b); }
inline Tensor operator/(const Tensor& a, const Tensor& b) { return ops::div(a, b); }
inline Tensor operator+(const Tensor& x, double b) { return ops::add(x, b); }
inline Tensor operator+(double a, const Tensor& x) { return ops::add(x, a); }
inline Tensor operator-(const Tensor& x, double b) { return ops::sub(x, b); }
inline Tensor operator-(double a, const Tensor& x) { return ops::sub(a, x); }
inline Tensor operator*(const Tensor& x, double b) { return ops::mul(x, b); }
inline Tensor operator*(double a, const Tensor& x) { return ops::mul(x, a); }
inline Tensor operator/(const Tensor& x, double b) { return ops::div(x, b); }
inline Tensor operator/(double a, const Tensor& x) { return ops::div(a, x); }
inline Tensor operator-(const Tensor& x) { return ops::neg(x); }

}  // namespace tessera
