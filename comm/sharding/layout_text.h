#pragma once

#include <string>

#include "comm/sharding/sharded_model.h"

namespace tessera::comm {

/// Layout of a model's flat buffers, for compare_among_ranks(): one line "unit NAME = ..." per unit
/// with counts, sizes, dtypes, and a hash over names, shapes, offsets, decay and rate of its parameters.
std::string layout_text(const ShardedModel& model);

}  // namespace tessera::comm
