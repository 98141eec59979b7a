#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "comm/control/store.h"

namespace tessera::tools {

/// Runs `decide` on rank 0 and returns its result on every rank, over the store.
/// @param name  distinct for each decision
/// @throws on rank 0 whatever `decide` throws; on the others CommError: Aborted, which quotes it,
///   Timeout at the deadline, or the loss of a rank (comm::tell_of_lost_rank())
std::string decide_on_rank_zero(comm::Store& store, const std::string& name, int rank,
                                std::chrono::milliseconds deadline,
                                const std::function<std::string()>& decide);

}  // namespace tessera::tools
