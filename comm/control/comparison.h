#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/control/store.h"
#include "core/base/error.h"

namespace tessera::comm {

/// What one rank says of itself, as lines "field = value".
struct RankText {
  int rank = 0;
  std::string process;  ///< "host, pid 12"
  std::string text;
};

/// Compares the texts field by field. The odd ones out are found for each field by majority; a tie
/// goes to the side of the lowest rank.
/// @param name  begins the message
/// @return nothing if all agree; else a Mismatch whose message has the first 8 fields that differ,
/// with all sides' ranks and values, and how many there are beside them; its culprits are the odd
/// ranks of all fields
std::optional<CommError> find_differences(std::string_view name,
                                          const std::vector<RankText>& ranks);

/// All ranks compare their texts; every rank that called ends well, or with the same error.
/// @param name  begins messages and keys; new for each comparison
/// @throws CommError Mismatch: see find_differences(); Timeout: with the ranks that did not come,
/// and the processes that did
void compare_among_ranks(Store& store, const std::string& name, int rank, int world_size,
                         const std::string& text, std::chrono::milliseconds deadline);

}  // namespace tessera::comm
