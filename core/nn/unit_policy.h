#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::nn {

/// Grouping of parameters into units. Set at most one field; default: one unit per block.
struct UnitPolicy {
  /// Units by block, merged with the next ones until they have at least this many parameters; the
  /// last may have fewer.
  std::int64_t least_parameters = 0;
  /// Globs of module paths, such as "h.*.mlp", where * and ? match within a name. Each matching
  /// module becomes a unit of its own; the rest of a block stays together.
  std::vector<std::string> patterns = {};
};

/// "block", a number of parameters such as "500K", "50M" or "1B", or patterns with commas.
/// @throws InvalidArgument for other texts
UnitPolicy parse_unit_policy(std::string_view text);

}  // namespace tessera::nn
