#pragma once

#include <string>

#include "comm/sharding/sharded_model.h"

namespace tessera::comm {

/// How a model's parameters lie in their flat buffers, for compare_among_ranks(): one line "unit
/// NAME = ..." for each unit, with the number of its parameters, the sizes of its buffer, the
/// dtypes, and a hash over names, shapes, offsets and decay of all its parameters. The same on all
/// ranks whose collectives fit together.
std::string layout_text(const ShardedModel& model);

}  // namespace tessera::comm
