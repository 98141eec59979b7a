#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "io/consolidate/source.h"
#include "io/pickle/pickle_writer.h"

namespace tessera::io {

/// State that the optimizer keeps for a weight, as in torch.optim.
struct WeightState {
  std::string name;
  std::vector<std::pair<std::string, const ExportTensor*>> moments;  ///< by kind: "exp_avg", ...
  bool decays = false;  ///< a moment has two or more dims
};

/// The optimizer state of an export, by weights: in the order of source.parameters, then by name.
/// Makes `step` float32, as torch.optim has it. Adds a warning if the number of steps is unknown, or
/// the state is not AdamW's.
/// @param source  with moments; its weights may be empty
/// @throws Unsupported on state that does not belong to a weight
std::vector<WeightState> weight_states(ConsolidateSource& source);

/// Groups of named weights, in the order of source.parameters, that have all states once. Empty,
/// with a warning, if the source does not say its hyperparameters, or not of all states.
std::vector<ParamGroup> weight_groups(ConsolidateSource& source,
                                      const std::vector<WeightState>& states);

/// Pushes a value of ParamGroup::settings; arrays become tuples.
void pickle_setting(PickleWriter& pickle, const Json& value);

/// Pushes a list of texts.
void pickle_names(PickleWriter& pickle, const std::vector<std::string>& names);

/// The four bytes of the tensor `step`.
std::string step_bytes(std::int64_t step);

}  // namespace tessera::io
