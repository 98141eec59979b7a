#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tools/tessera/launch/launcher.h"

namespace tessera::tools {

struct RestartOptions {
  int restarts = 0;   ///< at most
  int min_nproc = 0;  ///< ranks that a restart may do with; 0: it takes as many as before
  /// Whether so many ranks can share the work.
  std::function<bool(int nproc)> fits = [](int) { return true; };
  /// Step of the newest committed checkpoint of the run; empty: there is none.
  std::function<std::optional<std::int64_t>()> newest_step;
  /// What ranks are started with after a failure. @param has_checkpoint  newest_step() said one
  std::function<std::vector<std::string>(bool has_checkpoint)> arguments;
  /// Before a restart; a signal that comes meanwhile ends the run.
  std::chrono::milliseconds pause{500};
};

/// launch(), and after a failure all ranks anew, with a new run id and store, as the ranks of the
/// one before have ended. A line says why, and from which step they go on.
///
/// Not started again are: what ended well or by a signal; usage and configuration (exit code 2);
/// and two failures in a row without a checkpoint committed in between. If the same rank fails
/// twice without one, and min_nproc allows it, the next smaller number of ranks that fits goes on
/// instead.
///
/// @return the exit code of the last launch; stop_exit_code(n) if signal n came between two
/// @throws as launch() does
int launch_with_restarts(int nproc, const std::vector<std::string>& argv,
                         const RestartOptions& restarts, const LaunchOptions& options = {});

}  // namespace tessera::tools
