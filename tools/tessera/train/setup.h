#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "io/checkpoint/reader.h"
#include "io/data/dataset.h"
#include "io/data/sampler.h"
#include "io/hf/model_source.h"
#include "models/gpt2_config.h"
#include "tools/tessera/config/config.h"
#include "tools/tessera/train/checkpoints.h"
#include "tools/tessera/train/load_state.h"

namespace tessera::tools {

/// A run's model, data and start: the configuration resolved against the checkpoint, model and data
/// that it names. Equal on every rank.
struct RunSetup {
  Config config;             ///< every value as used
  models::Gpt2Config model;  ///< `seq_len`: positions; rows have config.model.seq_len tokens
  io::Dataset dataset;
  std::unique_ptr<io::Sampler> train;
  std::unique_ptr<io::Sampler> val;  ///< null if there is no validation data

  std::optional<io::CheckpointReader> resume;  ///< the checkpoint to continue, or
  std::unique_ptr<io::ModelSource> init_from;  ///< the starting weights; neither: random weights
  TrainerState state;                          ///< zeros for a new run
  LoadPlan load;                               ///< tensors to load
  std::vector<std::string> notes;              ///< shown before the first step
};

/// A model's tokenizer: its checkpoint's, or that of a tokenizer_tessera.json beside it. Null if
/// there is none that this build reads.
io::TokenizerPtr model_tokenizer(const io::ModelSource& source);

/// Opens model and data. Shape keys that were not given come from the checkpoint or model; given
/// ones must agree with it, unless checkpoint.load_policy or load_tensors lets tensors that do not
/// fit be left out. A model.seq_len below the model's positions shortens the rows, not the model.
/// @param resume  the checkpoint to continue, if any
/// @throws InvalidArgument listing all keys and tensors that do not fit; IoError,
///         CorruptCheckpoint, Unsupported
RunSetup set_up(Config config, int world_size, const std::optional<std::filesystem::path>& resume);

}  // namespace tessera::tools
