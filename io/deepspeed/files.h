#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/base/file.h"

namespace tessera::io {

/// Files of a DeepSpeed checkpoint. Its folder is in the run's directory, next to `latest`, which
/// has the folder's name.
struct DeepSpeedFiles {
  fs::path run;
  std::vector<std::string> models;      ///< "global_step20/mp_rank_00_model_states.pt"
  std::vector<std::string> optimizers;  ///< by rank; none without ZeRO
};

/// Whether a directory is a DeepSpeed checkpoint, or a run with at least one.
bool is_deepspeed(const fs::path& dir);

/// Finds the files of a checkpoint, or of the one that `latest` of a run names.
/// @throws InvalidArgument if `latest` is missing; CorruptCheckpoint if it names none, or the file
///         of a rank is missing; Unsupported on model parallelism, pipelines and experts
DeepSpeedFiles find_deepspeed(const fs::path& dir);

}  // namespace tessera::io
