#pragma once

#include <memory>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Opens a DeepSpeed checkpoint (see DeepSpeedStates), or the newest of a run. Its path() is the
/// run's directory. Weights and moments are named as in other programs' nested dicts:
/// NAME and optimizer.state.NAME.exp_avg.
/// @param moments  whether to open moments; else their names are in left_out()
/// @throws as find_deepspeed, read_deepspeed_model, read_deepspeed_optimizer, DeepSpeedStates
std::unique_ptr<ShardedSource> open_deepspeed(const fs::path& dir, bool moments = true);

}  // namespace tessera::io
