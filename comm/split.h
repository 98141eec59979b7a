#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/subgroup.h"

namespace tessera::comm {

struct SplitOptions {
  SubgroupPtr group = {};  ///< of the parent
  std::string key;         ///< prefix of the subgroups' keys, equal on all ranks
  std::uint64_t number;    ///< of the parent's split() calls so far
  /// Time within which the slowest rank connects and arrives.
  std::chrono::milliseconds connect_time;
};

/// Implements Communicator::split(): checks that the ranks agree, calls `connect`, and waits until
/// all ranks have connected. A failure fails the parent.
/// @param connect  connects this rank as `rank` of the group
std::unique_ptr<Communicator> split_communicator(
    Communicator& parent, const SplitOptions& options, const std::vector<int>& members,
    const std::string& kind,
    const std::function<std::unique_ptr<Communicator>(SubgroupPtr, int rank)>& connect);

/// Error of ranks that disagree on the groups of a split; nothing if they agree. A rank is blamed
/// for claiming a member of a group whose members agree; if there are no such ranks, all ranks whose
/// groups disagree are blamed.
/// @param claimed  members of the group that each rank joins, by rank, like the members
/// @param group    the parent's; the error names ranks of the world
std::optional<CommError> find_split_mismatch(const std::vector<std::vector<int>>& claimed,
                                             const std::string& kind, const Subgroup* group);

}  // namespace tessera::comm
