#pragma once

#include <cstdint>
#include <vector>

#include "core/base/rng.h"
#include "core/base/tensor_view.h"

namespace tessera {
class Context;
}

namespace tessera::kernels {

/// Settings of AdamW in f32; v_scale = 1 / sqrt(1 - b2^t).
struct AdamWRates {
  float v_scale = 0, scale = 1, eps = 0;
  float beta1 = 0, beta2 = 0, one_minus_beta1 = 1, one_minus_beta2 = 1;
};

/// Elements [begin, end) of the tensors of an AdamW step, with settings of their own.
struct AdamWRange {
  std::int64_t begin = 0, end = 0;
  double lr = 0, weight_decay = 0;
  std::uint64_t place = 0;          ///< stream of random words
  std::uint64_t first_element = 0;  ///< number of the first element's word
  /// Written by adamw(), which computes them in f64: 1 - lr wd, and lr / (1 - b1^t).
  float decay = 1, rate = 0;
};

/// Selects the weights that decay: all, or only those that the update makes smaller ("cautious":
/// Chen et al. 2025, arXiv:2510.12402).
enum class Decay : std::uint8_t { All, Shrinking };

/// One AdamW step over ranges of a flat buffer, in one pass over weights and moments.
///
/// param                      [n] f32 or bf16, contiguous
/// grad, exp_avg, exp_avg_sq  [n] f32, contiguous
/// ranges                     disjoint; other elements do not change
/// factor                     optional, one f32, multiplies grad_scale; if NaN, nothing changes
///                            (see ClipFactor)
/// copy                       optional, [n] bf16, contiguous: receives the new param, rounded
///   g = grad_scale * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
///   param = param (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
/// Computes in f32. A bf16 param is rounded to nearest or, with `stochastic`, away from zero with a
/// probability equal to the discarded fraction, so that small updates count on average. Element i of
/// a range uses word first_element + i of the stream (Rounding, step, place) of the seed. On a GPU, up
/// to 64 ranges are one launch. Sources: Loshchilov and Hutter 2019, arXiv:1711.05101,
/// algorithm 2 (as in PyTorch's AdamW); stochastic rounding: Gupta et al. 2015, arXiv:1502.02551.
struct AdamW {
  TensorView param, grad, exp_avg, exp_avg_sq;
  std::vector<AdamWRange> ranges;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  std::int64_t step = 1;  ///< t, from 1
  double grad_scale = 1.0;
  TensorView factor{}, copy{};
  bool stochastic = false;
  const RngStep* rng = nullptr;  ///< seed of the rounding, in device memory
  Decay decay = Decay::All;
  AdamWRates rates{};  ///< written by adamw(), which computes them in f64
};
void adamw(Context& context, const AdamW& args);

/// The same with moments in 8 bits, in blocks of 64 elements of the flat buffer (moment_code.h). Weights
/// are updated by the new moments before these are rounded, with random bits of `place` and the
/// element's number.
///
/// exp_avg     [n] i8, exp_avg_sq  [n] u8
/// *_scale     [n / 64] f32
/// ranges      begin at multiples of 64; each is (a part of) one parameter, where first_element is a
///             multiple of 64, too, and place is the parameter's
struct AdamW8bit {
  AdamW step;
  TensorView exp_avg_scale, exp_avg_sq_scale;
};
void adamw_8bit(Context& context, const AdamW8bit& args);

/// The first part of a Muon step:
///   g = factor * grad;  m = beta m + (1 - beta) g;  out = beta m + (1 - beta) g
///
/// grad, momentum  [n] f32, contiguous
/// out             [n] f32 or bf16, contiguous
/// factor          one f32; if NaN, momentum does not change
/// Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon, with Nesterov's momentum.
struct MuonMomentum {
  TensorView grad, momentum, out, factor;
  double beta = 0.95;
};
void muon_momentum(Context& context, const MuonMomentum& args);

/// out = x / max(sqrt(sum), 1e-7)
///
/// x    [n] f32, contiguous
/// sum  one f64
/// out  [n] f32 or bf16, contiguous; may be x
struct Normalize {
  TensorView x, sum, out;
};
void normalize(Context& context, const Normalize& args);

/// param = param (1 - lr wd) - rate * update, in one pass; rounding, factor and copy as in AdamW.
///
/// param   [n] f32 or bf16, contiguous
/// update  [n] f32 or bf16, contiguous
struct WeightUpdate {
  TensorView param, update, factor, copy{};
  double lr = 0, weight_decay = 0, rate = 0;
  Decay decay = Decay::All;
  bool stochastic = false;
  const RngStep* rng = nullptr;
  std::int64_t step = 1;
  std::uint64_t place = 0, first_element = 0;
};
void weight_update(Context& context, const WeightUpdate& args);

/// average += (1 - decay) (param - average), in f32
///
/// param    [n] f32 or bf16, contiguous
/// average  [n] f32, contiguous
/// factor   one f32; if NaN, average does not change
struct MovingAverage {
  TensorView param, average, factor;
  double decay = 0.999;
};
void moving_average(Context& context, const MovingAverage& args);

/// factor = min(1, max_norm / (sqrt(totals[0]) + 1e-6)), 1 if max_norm is 0, or NaN if any total is
/// not finite, so that AdamW with this factor changes nothing.
///
/// totals  [n] f64, contiguous; the first is the sum of squares of all gradients
/// factor  one element, f32
/// Clips as torch.nn.utils.clip_grad_norm_ does. The host does not wait for the device.
struct ClipFactor {
  TensorView totals, factor;
  double max_norm = 0;
};
void clip_factor(Context& context, const ClipFactor& args);

/// sum = sum of the squares of x. The host does not wait for the device.
///
/// x    f32, contiguous
/// sum  one element, f64
/// Computed in f64 over parts of fixed length, so that the result has the same bits for any number
/// of threads and in every call on a device.
struct SumOfSquares {
  TensorView x, sum;
};
void sum_of_squares(Context& context, const SumOfSquares& args);

/// Waits for the device and returns the sum of the squares of x; 0 on the meta device.
double sum_of_squares(Context& context, const TensorView& x);

}  // namespace tessera::kernels
