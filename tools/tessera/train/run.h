#pragma once

#include "comm/control/launch_environment.h"
#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// Runs one rank of a training run, from joining the other ranks to the last checkpoint. Rank 0
/// reports on standard error.
/// @param json  rank 0 prints a JSON summary on standard output at the end
/// @return the exit code: 0, or stop_exit_code(n) after a clean stop by signal n
int run_rank(Config config, const comm::LaunchEnvironment& environment, bool json);

}  // namespace tessera::tools
