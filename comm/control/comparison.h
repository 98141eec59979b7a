#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/control/store.h"
#include "core/base/error.h"

namespace tessera::comm {

/// A rank's text of lines "field = value".
struct RankText {
  int rank = 0;
  std::string process;  ///< "host, pid 12"
  std::string text;
};

/// Compares the texts field by field. Blames the minority of each field; in a tie, the lowest
/// rank's side counts as right.
/// @param name  begins the message
/// @return nothing if all agree; else a Mismatch with the first 8 fields that differ, the ranks and
///   values of each side, and the number of further fields; its culprits are the minorities of all
///   fields
std::optional<CommError> find_differences(std::string_view name,
                                          const std::vector<RankText>& ranks);

/// Compares the texts of all ranks. All ranks return, or all throw the same error.
/// @param name  prefix of messages and store keys; unique to each comparison
/// @throws CommError Mismatch: see find_differences(); Timeout naming the missing ranks and the
///   processes that arrived
void compare_among_ranks(Store& store, const std::string& name, int rank, int world_size,
                         const std::string& text, std::chrono::milliseconds deadline);

}  // namespace tessera::comm
