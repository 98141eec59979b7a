#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/checkpoint/index.h"
#include "io/hf/model_source.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// Weights and optimizer state of another program's checkpoint, under tessera's names if the model is
/// known, else under their own.
struct TrainingSource {
  std::string model_config;                                  ///< tessera's "model" section
  std::map<Section, std::unique_ptr<TensorSource>> tensors;  ///< of state, those of some weights
  std::optional<std::int64_t> step;  ///< updates that the optimizer made, if it is recorded
  std::vector<std::pair<std::string, std::string>> skipped;  ///< tensors of the source, and why
  std::vector<std::string> warnings;
};

/// @param source       opened with moments
/// @param config_file  config.json of the model; null: unknown
/// @param with_state   whether to take the optimizer's state
/// @throws InvalidArgument if the weights do not match the configuration; Unsupported on state of
///         another shape than its weight or of no weight, kinds of state that other weights have, and
///         weights that are state by their names; as read_foreign_model and FamilySource
TrainingSource open_training_source(std::unique_ptr<ShardedSource> source,
                                    const std::optional<fs::path>& config_file, bool with_state);

}  // namespace tessera::io
