#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "comm/sharding/sharded_model.h"
#include "io/checkpoint/reader.h"
#include "io/hf/model_source.h"
#include "io/pump/read_parts.h"

namespace tessera::train {

/// Tensors to load; the others start as random weights and as the optimizer's state does.
struct LoadPlan {
  std::map<io::Section, std::set<std::string>> tensors;
  /// Weights to load from another model, see `base` below: the frozen ones of LoRA.
  std::set<std::string> base;
  /// Number of rows that the source has of a tensor of `tensors`, if the model's has another.
  std::map<std::string, std::int64_t> resized;
  std::vector<std::string> notes;  ///< one sentence per group of tensors not loaded
};

/// Names and shapes of a model's parameters.
std::vector<io::TensorInfo> tensors_of(const nn::Module& model, bool trainable_only = false);

/// A state of an optimizer for the trainable parameters of a model.
struct StateTensorsOf {
  std::string state;
  bool starts_as_param = false;  ///< see optim::StateKind
  std::vector<io::TensorInfo> tensors;
};
using StateTensors = std::vector<StateTensorsOf>;
StateTensors state_tensors(const nn::Module& model, const optim::Optimizer& optimizer);

/// Compares all sections of a checkpoint with the run's model. A state that starts as the weights may be
/// missing. State that the optimizer lacks is left out, with a note.
/// @param expected  the model's tensors
/// @throws InvalidArgument listing all missing, unexpected and mismatched tensors, or on missing
///         optimizer state, unless the policy allows it
LoadPlan plan_resume(const io::CheckpointReader& reader,
                     const std::vector<io::TensorInfo>& expected, const StateTensors& states,
                     io::LoadPolicy policy);
/// The same for weights only.
/// @param chosen  patterns (see io::is_chosen): only matching tensors are loaded and compared;
///   empty: all
/// @param resizable  names of matrices that may have another number of rows: superfluous ones are not
///   loaded, and new ones are the mean of the others
/// @throws InvalidArgument also if a pattern matches no tensor
LoadPlan plan_weights(const io::ModelSource& source, std::vector<io::TensorInfo> expected,
                      io::LoadPolicy policy, const std::vector<std::string>& chosen = {},
                      const std::vector<std::string>& resizable = {});

/// Reads this rank's weights and moments from a checkpoint and verifies checksums. Copies to a GPU
/// need 512 KiB per thread.
/// @param seed  initializes the weights that are not in the plan
/// @param base  has the weights of plan.base; null if there are none
/// @throws IoError, CorruptCheckpoint; the model is then partly loaded
io::ReadReport load_training_state(comm::ShardedModel& sharded, const optim::Optimizer& optimizer,
                                   const io::CheckpointReader& reader, const LoadPlan& plan,
                                   int threads, std::uint64_t seed,
                                   const io::TensorSource* base = nullptr);
/// Reads this rank's weights from a checkpoint or another source.
io::ReadReport load_weights(comm::ShardedModel& sharded, const io::TensorSource& source,
                            const LoadPlan& plan, int threads, std::uint64_t seed,
                            const io::TensorSource* base = nullptr);

}  // namespace tessera::train
