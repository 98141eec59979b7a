#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/shard_layout.h"
#include "core/tensor.h"

namespace tessera::optim {

/// Elements [first, first + n) of a unit's flat buffer, which one rank updates.
/// `layout.ranges(first, first + n)` lists the parts of parameters in it; the rest is padding, whose
/// values and gradients are zero and stay so.
struct Segment {
  const ShardLayout& layout;
  std::int64_t first = 0;
  Tensor param;                 ///< [n] f32 or bf16, updated in place
  Tensor grad;                  ///< [n] f32, before clipping
  std::vector<Tensor> state{};  ///< [n] f32 each, in the order of Optimizer::state_names()
  Tensor copy{};                ///< [n] bf16 that receives param, rounded; may be undefined
};

/// Equal for all segments of a step.
struct UpdateOptions {
  double lr = 0;
  std::int64_t step = 1;  ///< from 1
  Tensor factor;          ///< [1] f32, clipping factor of the gradient; NaN: change nothing
};

/// Updates parameters from gradients, segment by segment. The result of an element must not depend
/// on how parameters are split into segments. Its state consists of tensors with the shapes of the
/// parameters, which are zero at first and stored in checkpoints by name.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Equal in every call: {"exp_avg", "exp_avg_sq"}. Letters, digits and '_'.
  virtual std::vector<std::string> state_names() const = 0;
  /// Works in order with the context's stream, without waiting for it.
  virtual void update(const Segment& segment, const UpdateOptions& options) const = 0;
};

}  // namespace tessera::optim
