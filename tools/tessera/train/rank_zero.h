#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "comm/control/store.h"

namespace tessera::tools {

/// Runs `decide` on rank 0 and returns the result on every rank, over the store.
/// @param name  unique for each decision
/// @throws on rank 0 the exception of `decide`; on other ranks CommError: Aborted with its text,
///   Timeout at the deadline, or the loss of a rank (comm::tell_of_lost_rank())
std::string decide_on_rank_zero(comm::Store& store, const std::string& name, int rank,
                                std::chrono::milliseconds deadline,
                                const std::function<std::string()>& decide);

}  // namespace tessera::tools
