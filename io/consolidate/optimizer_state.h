#pragma once

#include <cstdint>
#include <functional>
#include <optional>
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
  bool decays = false;                   ///< a moment has two or more dims
  std::optional<std::int64_t> number{};  ///< in source.parameters
};

/// The optimizer state of an export, by weights: in the order of source.parameters or, if that is
/// unknown, by name. Makes `step` float32, as torch.optim has it. Adds a warning if the source has no
/// hyperparameters.
/// @param source  with moments; its weights may be empty
/// @throws Unsupported on state that does not belong to a weight
std::vector<WeightState> weight_states(ConsolidateSource& source);

/// A setting of a param_group of torch.optim.AdamW.
struct GroupSetting {
  std::string key;
  std::function<void(PickleWriter&)> pickle;  ///< pushes the value
};

/// All settings that torch.optim.AdamW of PyTorch 2.4 to 2.15 keeps in a group, without "params".
std::vector<GroupSetting> group_settings(const AdamWSettings& settings, double weight_decay);

/// Pushes a list of texts.
void pickle_names(PickleWriter& pickle, const std::vector<std::string>& names);

/// The four bytes of the tensor `step`.
std::string step_bytes(std::int64_t step);

}  // namespace tessera::io
