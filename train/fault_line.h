#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/control/rank_status.h"
#include "comm/control/rendezvous.h"
#include "comm/control/store.h"
#include "core/base/error.h"

namespace tessera::train {

/// The line that every rank prints after a communication failure:
///
///     E042 step=1200 phase=reduce_scatter#88(h.3) culprit=rank 3 (host, pid 71, SIGKILL)
///     action=restart; the run resumes from its newest checkpoint, if it has one: lost rank 3 ...
///
/// without the line break, ending with the error's text. Step and phase are of this rank, the rest
/// is equal on all ranks. E041 a rank is missing at the start; E042 a rank is lost; E043 a rank is
/// late, stopped or stuck; E044 ranks call different collectives; E045 ranks differ in
/// configuration or build; E046 a rank aborted communication.
/// @param ranks  by rank; empty before the rendezvous
std::string fault_line(const CommError& error, const comm::RankState& state,
                       const std::vector<comm::Hello>& ranks);

/// Publishes this rank's error, so that the other ranks exit soon and name this rank. Ignores
/// errors that all ranks share: communication, a non-finite loss. Blocks no longer than a store
/// call.
/// @param process  "host, pid 12"
/// @return whether the error concerns this rank alone
bool tell_others(comm::Store& store, int rank, std::string_view process,
                 const std::exception& error) noexcept;

}  // namespace tessera::train
