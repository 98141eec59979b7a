#pragma once

#include <cstdint>
#include <vector>

#include "core/base/shard_layout.h"
#include "core/tensor.h"

namespace tessera::optim {

/// AdamW settings of a run. See kernels/optimizer.h for the update.
struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  ///< on the ranges whose parameters decay
};

/// A range of a flat segment with uniform weight decay. Includes padding, which stays zero.
struct DecayRange {
  std::int64_t begin = 0;  ///< elements within the segment
  std::int64_t end = 0;
  bool decay = false;
};

/// Splits elements [first, first + segment) of a layout into the fewest such ranges.
std::vector<DecayRange> decay_ranges(const ShardLayout& layout, std::int64_t first,
                                     std::int64_t segment);

/// One step over a segment, range by range.
/// @param param       [n] f32, or bf16, which is rounded stochastically
/// @param grad, exp_avg, exp_avg_sq  [n] f32
/// @param step        from 1
/// @param factor      [1] f32, clipping factor of the gradient; NaN: nothing changes
/// @param copy        [n] bf16 that receives param, rounded; may be undefined
/// @param place, first_element  select the random draws of the rounding: number of the unit, and
///   position of the segment's first element in the unit. Seed: see the context's rng_step()
/// @throws InvalidArgument on a shape, dtype or setting that does not fit
void adamw_step(const AdamWOptions& options, const std::vector<DecayRange>& ranges,
                const Tensor& param, const Tensor& grad, const Tensor& exp_avg,
                const Tensor& exp_avg_sq, double lr, std::int64_t step, const Tensor& factor,
                const Tensor& copy = {}, std::uint64_t place = 0, std::int64_t first_element = 0);

}  // namespace tessera::optim
