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
#include "models/gpt2_config.h"

namespace tessera::tools {

/// Which tensors a run takes from where it starts; the others keep their starting values: random
/// weights, moments of zero.
struct LoadPlan {
  std::map<io::Section, std::set<std::string>> tensors;
  std::vector<std::string> notes;  ///< what is left out, a sentence each
};

/// Compares all sections of a checkpoint with what the run's model needs.
/// @throws InvalidArgument that lists all missing, unexpected and mismatched tensors at once, or
///         says what to do if there is no optimizer state, unless the policy allows it
LoadPlan plan_resume(const io::CheckpointReader& reader, const models::Gpt2Config& model,
                     io::LoadPolicy policy);
/// The same for weights alone.
/// @param chosen  patterns (see io::is_chosen): only tensors that match one are loaded, and the
///                policy applies to them; empty: all
/// @throws InvalidArgument also if a pattern fits no tensor of source or model
LoadPlan plan_weights(const io::ModelSource& source, const models::Gpt2Config& model,
                      io::LoadPolicy policy, const std::vector<std::string>& chosen = {});

/// Fills weights and moments of this rank from a checkpoint, reading what it holds and no more than
/// the rest of the chunks at its ends, on `threads` threads; checked as it is read. On the CPU
/// values go straight to their place, to a device through 512 KiB a thread.
/// @param seed  of weights that the plan leaves out
/// @throws IoError, CorruptCheckpoint; the model's values must not be used then
io::ReadReport load_training_state(comm::ShardedModel& sharded, const io::CheckpointReader& reader,
                                   const LoadPlan& plan, int threads, std::uint64_t seed);
/// Fills the weights of this rank, as above.
io::ReadReport load_weights(comm::ShardedModel& sharded, const io::ModelSource& source,
                            const LoadPlan& plan, int threads, std::uint64_t seed);

}  // namespace tessera::tools
