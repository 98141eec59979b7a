#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "tools/tessera/launch/launcher_signals.h"

namespace tessera::tools {

struct LaunchOptions {
  std::string program = "/proc/self/exe";
  /// Start ranks with SIGUSR1 blocked; each unblocks it once it has a handler.
  bool blocks_warnings = true;
  /// Ranks agree on stop requests, so that one which exits with 130 or 143 is followed by the others.
  /// Else such an exit is a failure, unless a request was forwarded.
  bool stop_together = true;
  /// Descriptor for the launcher's own lines and the output of ranks other than 0.
  int error_fd = 2;
  /// Time that the other ranks have to report a rank's failure and exit, before SIGTERM.
  std::chrono::milliseconds notice{2000};
  /// Time without a heartbeat after which a rank counts as lost and the run ends; zero: never.
  /// Ranks apply it to the launcher, too.
  std::chrono::milliseconds heartbeat_timeout{4000};
  /// Time for a rank to exit after announcing it.
  std::chrono::milliseconds leave{30'000};
  /// Time from SIGTERM to SIGKILL.
  std::chrono::milliseconds grace{800};
};

struct LaunchOutcome {
  /// 0 if all ranks exited with 0; stop_exit_code(n) if all ranks stopped by signal n; 4 if a rank
  /// was killed by a signal, or had to be killed after a single stop request; else the exit code of
  /// the first rank that failed, preferring codes other than 4, with which ranks exit that lost
  /// another rank.
  int code = 0;
  int signal = 0;       ///< the signal that stopped the ranks; 0: none
  bool failed = false;  ///< a rank failed, other than by a stop signal
  int culprit = -1;     ///< rank of the root cause; -1: none or unknown
  std::string failure;  ///< "rank 1 was killed by SIGKILL"; empty: none failed
};

/// Starts `nproc` ranks on this host as child processes that run options.program with `argv`
/// (argv[0] included), serves their store, and waits for all to exit.
///
/// Environment of the ranks: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, TESSERA_RENDEZVOUS,
/// TESSERA_RUN_ID, TESSERA_TOKEN (new and random), and OMP_NUM_THREADS (an equal share of the
/// cores) unless it is set. Ranks die with this process. Rank 0 writes to our standard output and
/// error; the output of other ranks goes to standard error, each line prefixed with "[rank 1] ".
///
/// SIGINT, SIGTERM and SIGUSR1 are forwarded to all ranks; a second SIGINT or SIGTERM, 1 s or more
/// after the first, terminates them. A rank that dies of SIGINT or SIGTERM, or exits with 130 or
/// 143 (see stop_together), counts as a stop request: all ranks stop without failure.
///
/// When a rank fails or its heartbeats stop, all ranks learn why, one line names the root cause,
/// and the remaining ranks are terminated. A rank that announced its exit and still runs is killed
/// and named; the others continue. If this process itself was stopped for longer than
/// heartbeat_timeout, the line says so and names no rank. Before returning, waits for the log's
/// reader: 10 s if it stalls, 60 s in total; then drops the rest of the log.
///
/// Call it before this process starts threads, which could receive the signals.
///
/// @param signals  for repeated launches: signals between launches stay pending in it
/// @throws InvalidArgument if nproc < 1; IoError if a process or pipe can't be made
LaunchOutcome launch(int nproc, const std::vector<std::string>& argv,
                     const LaunchOptions& options = {},
                     const LauncherSignals& signals = LauncherSignals());

/// Writes "tessera: TEXT" to options.error_fd with control characters escaped; blocks 10 s at most.
void say(const LaunchOptions& options, std::string_view text);

}  // namespace tessera::tools
