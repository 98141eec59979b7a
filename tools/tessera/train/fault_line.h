#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/control/rank_status.h"
#include "comm/control/rendezvous.h"
#include "core/base/error.h"

namespace tessera::tools {

/// What every rank prints when communication has failed, in a form that scripts can read:
///
///     E042 step=1200 phase=reduce_scatter#88(h.3) culprit=rank 3 (host, pid 71, SIGKILL)
///     action=start it again; it goes on from the newest checkpoint: lost rank 3 ...
///
/// on one line, with the error's own words after the action. Step and phase are this rank's, the
/// rest is the same on all of them. E041 a rank did not come to the start; E042 one was lost; E043
/// one is late, stopped or stuck; E044 ranks do not call the same collectives; E045 ranks were not
/// started alike; E046 a rank ended communication.
/// @param ranks  processes by rank; empty before they have met
std::string fault_line(const CommError& error, const comm::RankState& state,
                       const std::vector<comm::Hello>& ranks);

}  // namespace tessera::tools
