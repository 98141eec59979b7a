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
  int min_nproc = 0;  ///< fewest ranks of a restart; 0: as many as before
  /// Whether this number of ranks can share the work.
  std::function<bool(int nproc)> fits = [](int) { return true; };
  /// Step of the run's newest committed checkpoint; empty: none.
  std::function<std::optional<std::int64_t>()> newest_step;
  /// Arguments of the ranks after a failure. @param has_checkpoint  newest_step() is not empty
  std::function<std::vector<std::string>(bool has_checkpoint)> arguments;
  /// Before a restart; a signal during it ends the run.
  std::chrono::milliseconds pause{500};
};

/// launch(), and after a failure again with a new run id and store, once all ranks have ended. A
/// line says why, and from which step the ranks go on.
///
/// No restart after success, a signal, or exit code 2 (usage and configuration); nor after two
/// failures in a row without a checkpoint committed in between. If the same rank fails twice
/// without one, and min_nproc allows it, the next smaller number of ranks that fits goes on.
///
/// @return the exit code of the last launch; stop_exit_code(n) after signal n between two launches
/// @throws as launch() does
int launch_with_restarts(int nproc, const std::vector<std::string>& argv,
                         const RestartOptions& restarts, const LaunchOptions& options = {});

}  // namespace tessera::tools
