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

/// What a run trains, on what, and where it starts: the configuration resolved against the
/// checkpoint, the model and the data that it names. The same on every rank.
struct RunSetup {
  Config config;             ///< every value as used
  models::Gpt2Config model;  ///< `seq_len`: positions; rows have config.model.seq_len tokens
  io::Dataset dataset;
  std::unique_ptr<io::Sampler> train;
  std::unique_ptr<io::Sampler> val;  ///< null if there is no validation data

  std::optional<io::CheckpointReader> resume;  ///< go on from here, or
  std::unique_ptr<io::ModelSource> init_from;  ///< start from these weights, or from random ones
  TrainerState state;                          ///< where to go on; zeros for a new run
  LoadPlan load;                               ///< what is taken from there
  std::vector<std::string> notes;              ///< what a user should know before the first step
};

/// The tokenizer that a model was trained with: of its checkpoint's run, or of the file
/// tokenizer_tessera.json beside it. Null if there is none that this build reads.
io::TokenizerPtr model_tokenizer(const io::ModelSource& source);

/// Opens everything. Shape keys that were given must agree with the checkpoint's or model's; those
/// that were not are taken from it. model.seq_len may be smaller than a model's positions: rows are
/// shorter then, and the model keeps its positions. Unless checkpoint.load_policy is exact, and if
/// checkpoint.load_tensors chooses tensors, keys that were given win: what does not fit then is
/// left out, or was not to be taken.
/// @param resume  the checkpoint to go on from, if any
/// @throws InvalidArgument that lists all keys and tensors which do not fit at once; IoError,
///         CorruptCheckpoint, Unsupported
RunSetup set_up(Config config, int world_size, const std::optional<std::filesystem::path>& resume);

}  // namespace tessera::tools
