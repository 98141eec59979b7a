#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "comm/control/store.h"

namespace tessera::tools {

/// Runs `decide` on rank 0 and gives its result to every rank, over the store.
/// @param name  new for each decision
/// @throws on rank 0 what `decide` throws; on the others CommError: Aborted, which quotes it;
///         Timeout at the deadline; or the failure that comm::tell_of_lost_rank() published
std::string decide_on_rank_zero(comm::Store& store, const std::string& name, int rank,
                                std::chrono::milliseconds deadline,
                                const std::function<std::string()>& decide);

}  // namespace tessera::tools
