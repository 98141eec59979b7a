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
  int restarts = 0;   ///< maximum number
  int min_nproc = 0;  ///< fewest ranks of a restart; 0: the same number
  /// Whether the configuration is valid for this number of ranks.
  std::function<bool(int nproc)> fits = [](int) { return true; };
  /// Step of the run's newest committed checkpoint; empty: none.
  std::function<std::optional<std::int64_t>()> newest_step;
  /// Arguments of the ranks after a failure. @param has_checkpoint  train::newest_step() is not empty
  std::function<std::vector<std::string>(bool has_checkpoint)> arguments;
  /// Delay before a restart; a signal during it ends the run.
  std::chrono::milliseconds pause{500};
};

/// Calls launch(), and again with a new run id and store when all ranks of a failed launch have
/// ended. Each restart prints the reason and the step from which the ranks resume.
///
/// No restart after success, a signal, exit code 2 (usage and configuration), or two consecutive
/// failures without a new checkpoint. If the same rank causes both failures and min_nproc allows
/// it, the run continues with the next smaller valid number of ranks.
///
/// @return the exit code of the last launch; stop_exit_code(n) after signal n between launches
/// @throws as launch() does
int launch_with_restarts(int nproc, const std::vector<std::string>& argv,
                         const RestartOptions& restarts, const LaunchOptions& options = {});

}  // namespace tessera::tools
