#pragma once

#include <string>
#include <vector>

#include "core/base/shard_layout.h"
#include "core/nn/module.h"

namespace tessera {

/// Parameters that are gathered and released together.
struct Unit {
  std::string name;  ///< path of the module that has them; "root" for the root's own
  std::vector<Parameter*> parameters;
};

/// Splits a model into units: each block, and each part outside of the blocks. Every parameter is
/// in one unit. Order: the own parameters of a module, then its parts. No unit is empty.
std::vector<Unit> units_of(const nn::Module& model);

/// Layout of a unit's flat buffer, split over `world_size` ranks.
ShardLayout layout_of(const Unit& unit, int world_size);

}  // namespace tessera
