#pragma once

#include <string>
#include <vector>

#include "core/base/shard_layout.h"
#include "core/nn/module.h"
#include "core/nn/unit_policy.h"

namespace tessera {

/// Parameters that are gathered and released together.
struct Unit {
  /// Path of the module that has them, or "first..last" of several; "root" for the root's own
  std::string name;
  std::vector<Parameter*> parameters;
};

/// Splits a model into units; by block: each block, and each part outside of the blocks. Every
/// parameter is in one unit. Order: the own parameters of a module, then its parts. No unit is
/// empty.
/// @throws InvalidArgument if a pattern matches no module, with the paths that there are
std::vector<Unit> units_of(const nn::Module& model, const nn::UnitPolicy& policy = {});

/// Layout of a unit's flat buffer, split over `world_size` ranks.
ShardLayout layout_of(const Unit& unit, int world_size);

}  // namespace tessera
