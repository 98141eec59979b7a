#pragma once

#include <cstdint>

#include "core/base/context.h"
#include "core/base/tensor_view.h"

namespace tessera::kernels {

/// One AdamW step over a flat range, all moments and weights in one pass over memory.
///
/// param, grad, exp_avg, exp_avg_sq  [n] f32, contiguous
///   g = grad_scale * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
///   param = param (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
/// Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2 (as in PyTorch's AdamW).
struct AdamW {
  TensorView param, grad, exp_avg, exp_avg_sq;
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  std::int64_t step = 1;  ///< t, from 1
  double grad_scale = 1.0;
};
void adamw(Context& context, const AdamW& args);

/// sum = the sum of the squares of x, where x lies: nothing waits for the device.
///
/// x    f32, contiguous
/// sum  one element, f64
/// In float64, over fixed parts: the same for any number of threads, and in every call on a device.
struct SumOfSquares {
  TensorView x, sum;
};
void sum_of_squares(Context& context, const SumOfSquares& args);

/// The same, to the host: waits for the device. 0 on the meta device.
double sum_of_squares(Context& context, const TensorView& x);

}  // namespace tessera::kernels
