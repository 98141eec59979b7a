#pragma once

#include "tools/tessera/command.h"
#include "tools/tessera/train/checkpoints.h"

namespace tessera::tools {

Command add_checkpoint_list(CLI::App& parent);
Command add_checkpoint_inspect(CLI::App& parent);
Command add_checkpoint_verify(CLI::App& parent);
Command add_checkpoint_diff(CLI::App& parent);
Command add_checkpoint_reshard(CLI::App& parent);

inline constexpr const char* kOneCheckpoint = "A checkpoint, or a run (its newest checkpoint)";

}  // namespace tessera::tools
