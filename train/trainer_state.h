#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "io/checkpoint/reader.h"

namespace tessera::train {

/// Content of a checkpoint's trainer.json.
struct TrainerState {
  std::int64_t step = 0;             ///< updates made
  std::int64_t position = 0;         ///< global index of the next sample
  std::string tokenizer = "null";    ///< JSON; null for token files
  std::string config = "null";       ///< JSON: resolved configuration of the run
  std::optional<double> val_loss{};  ///< of these weights, if measured
};
std::string format_trainer_state(const TrainerState& state);
/// @throws CorruptCheckpoint naming source and field, NewerFormat
TrainerState parse_trainer_state(const std::string& text, const std::string& source);
/// Reads and verifies the trainer state of a checkpoint.
/// @throws IoError; CorruptCheckpoint, also on a step other than the checkpoint's; NewerFormat;
///         InvalidArgument if the checkpoint has none
TrainerState read_trainer_state(const io::CheckpointReader& reader);

/// Step of a run's newest committed checkpoint; empty if there is none or it cannot be listed.
std::optional<std::int64_t> newest_step(const std::filesystem::path& run_dir);

/// The validation loss stored with a checkpoint, if any. @throws IoError, CorruptCheckpoint
std::optional<double> stored_val_loss(const std::filesystem::path& checkpoint);

}  // namespace tessera::train
