#pragma once

#include <cstdint>
#include <functional>
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
  Tensor param;  ///< [n] f32 or bf16, updated in place
  Tensor grad;   ///< [n] f32, before clipping
  /// In the order of state_names(), [StatePlaces::size / StateKind::block] each
  std::vector<Tensor> state{};
  Tensor copy{};               ///< [n] bf16 that receives param, rounded; may be undefined
  DType compute = DType::F32;  ///< dtype in which the model computes: f32 or bf16
  /// Collects the segments of all ranks in a buffer of the whole unit, [padded_size] f32 or bf16, which
  /// has this rank's at `first`. A collective; null if the segment is the whole unit.
  std::function<void(const Tensor& whole)> gather{};
};

/// Equal for all segments of a step.
struct UpdateOptions {
  double lr = 0;
  std::int64_t step = 1;  ///< from 1
  Tensor factor;          ///< [1] f32, clipping factor of the gradient; NaN: change nothing
};

/// Values of a state tensor.
struct StateKind {
  DType dtype = DType::F32;
  /// Elements of the parameter for each value; divides ShardLayout::kAlignment.
  std::int64_t block = 1;
  /// Starts with the parameter's values instead of zeros; needs f32 and block 1.
  bool starts_as_param = false;
};

/// Updates parameters from gradients, segment by segment. The result of an element must not depend
/// on how parameters are split into segments. Its state consists of tensors with the shapes of the
/// parameters, or with a value for each block of elements, which start as state_kind() says and are
/// stored in checkpoints by name.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Equal in every call: {"exp_avg", "exp_avg_sq"}. Letters, digits and '_'.
  virtual std::vector<std::string> state_names() const = 0;
  virtual StateKind state_kind(std::size_t /*i*/) const { return {}; }
  /// Shape of state tensor i of a parameter: its own, or [number of blocks].
  Shape state_shape(std::size_t i, const Shape& parameter) const;
  /// Whether a parameter has state tensor i of state_names().
  virtual bool has_state(std::size_t i, const ParameterSlot& slot) const;
  /// Works in order with the context's stream, without waiting for it.
  virtual void update(const Segment& segment, const UpdateOptions& options) const = 0;
};

/// Where a state tensor has the elements of a segment: at their places in the segment, or without gaps
/// for parameters that lack the state. Each range starts at a multiple of ShardLayout::kAlignment.
struct StatePlaces {
  std::vector<std::int64_t> first;  ///< of each of the segment's ranges; -1: none
  std::int64_t size = 0;
  StatePlaces(const Optimizer& optimizer, std::size_t i, const ShardLayout& layout,
              std::int64_t segment_begin, std::int64_t segment_size);
};

}  // namespace tessera::optim
