#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/dtype.h"
#include "core/nn/unit_policy.h"

namespace tessera::comm {

/// Whether a rank holds the whole of something, or its segment in the shard group.
enum class Hold : std::uint8_t { Whole, Split };

/// How a model is distributed over the shard group of a mesh, and in which precision. Master weights
/// and optimizer state are always split over the group; a group of one rank splits nothing.
struct ShardSpec {
  nn::UnitPolicy units = {};      ///< which parameters are gathered and reduced together
  Hold parameters = Hold::Split;  ///< between their uses
  Hold gradients = Hold::Split;   ///< between micro-batches; whole: reduced once per step
  /// With split parameters: release them after forward and gather them again for backward.
  bool reshard_after_forward = true;
  /// Units gathered in advance, to hide a slow network; each takes the memory of a unit.
  int gather_ahead = 1;
  /// Units whose whole gradients may wait for their reduction while the next unit's are computed. With
  /// 0, backward waits before it writes gradients; recomputation still overlaps with the reduction.
  int reduce_behind = 1;

  /// Most tokens of a rank's micro-batch, on any rank; 0: unknown. If known, the gradient of an
  /// embedding that is a unit of its own is sent as the rows of those tokens, where that takes less
  /// memory than the whole. Needs split gradients, gradients and reduction in f32, and the same number
  /// of lookups by all ranks of a shard group in a micro-batch.
  std::int64_t tokens = 0;

  DType compute = DType::F32;  ///< parameters that the model reads: f32 or bf16
  /// Weights that are updated and saved: f32, or bf16 if that is the compute dtype (updates are then
  /// rounded stochastically).
  DType master = DType::F32;
  DType frozen = DType::F32;     ///< weights without gradient: f32, or the compute dtype
  DType gradient = DType::F32;   ///< gradients during backward: f32 or bf16
  DType reduction = DType::F32;  ///< what the shard group sends to sum up gradients: f32 or bf16

  /// Results of units, for example f32 to add up in f32 what blocks add in bf16; the inputs of units
  /// are then converted to the compute dtype. None: as they are computed.
  std::optional<DType> output = {};

  /// On a GPU: master weights (f32) and optimizer state lie in host memory and are updated there; the
  /// device holds the segment in the compute dtype. No effect on the CPU.
  bool offload = false;

  /// @throws InvalidArgument on dtypes that do not fit
  void validate() const;
};

/// The spec of a mode, in float32. "none": nothing is split, in shard groups of one rank;
/// "optimizer": the optimizer state; "gradients": gradients too; "full": parameters too, so that a
/// rank holds its part of everything; "hybrid": full within the groups of a mesh.
/// @throws InvalidArgument for other names
ShardSpec shard_spec(std::string_view mode);

/// Size of a mode's shard groups. @param group  that of "hybrid"
int shard_group_size(std::string_view mode, int world_size, int group);

}  // namespace tessera::comm
