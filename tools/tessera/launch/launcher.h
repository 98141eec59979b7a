#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "tools/tessera/launch/launcher_signals.h"

namespace tessera::tools {

struct LaunchOptions {
  /// Program that the ranks run: by default this one.
  std::string program = "/proc/self/exe";
  /// Descriptor for the launcher's own lines and the output of ranks other than 0.
  int error_fd = 2;
  /// From a rank's failure to SIGTERM for the others: their time to report it and end.
  std::chrono::milliseconds notice{2000};
  /// A rank without a heartbeat for so long ends the run; zero: never. Ranks allow the launcher as
  /// much.
  std::chrono::milliseconds heartbeat_timeout{4000};
  /// Time for a rank to end after it announced that it leaves.
  std::chrono::milliseconds leave{30'000};
  /// From SIGTERM to SIGKILL.
  std::chrono::milliseconds grace{800};
};

/// Starts `nproc` ranks on this host as child processes that run options.program with `argv`
/// (argv[0] included), serves their store, and waits for all to end.
///
/// Environment of the ranks: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, TESSERA_RENDEZVOUS,
/// TESSERA_RUN_ID, TESSERA_TOKEN (new and random), and OMP_NUM_THREADS (an equal share of the
/// cores) unless it is set. Ranks die with this process. Rank 0 writes to our standard output and
/// error; the output of other ranks goes to standard error, each line prefixed with "[rank 1] ".
///
/// SIGINT, SIGTERM and SIGUSR1 are forwarded to all ranks; a SIGINT or SIGTERM 1 s or more after
/// the first ends them. A rank that ends by SIGINT or SIGTERM, or exits with 130 or 143, was
/// signalled itself: all ranks stop, and that is no failure.
///
/// When a rank fails or its heartbeats stop, all ranks are told why, one line names the root cause,
/// and ranks that still run are ended. A rank that announced that it leaves and does not end is
/// killed and named; the others go on. If this process was itself stopped for longer than
/// heartbeat_timeout, the line says so and names no rank. An unread log delays only the end: by 10
/// s, or a minute if it is read slowly; the rest is dropped then.
///
/// Call it before this process has other threads, which could receive its signals.
///
/// @return 0 if all ranks ended with 0; 4 if a rank was killed by a signal; else the exit code of
/// the first rank that failed, where other codes outrank 4, a consequence of another rank's
/// failure; stop_exit_code(n) if all ranks ended because of signal n; 4 if a rank had to be killed
/// then
/// @throws InvalidArgument if nproc < 1; IoError if a process or pipe can't be made
int launch(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options = {});

/// How the ranks of one launch ended.
struct LaunchOutcome {
  int code = 0;         ///< as launch() returns it
  int signal = 0;       ///< by which the ranks stopped; 0: none
  bool failed = false;  ///< other than by signals
  int culprit = -1;     ///< rank of the root cause; -1: none or unknown
  std::string failure;  ///< "rank 1 was killed by SIGKILL"; empty: none failed
};

/// launch() for repeated launches: signals between two of them stay pending in `signals`.
LaunchOutcome launch_once(int nproc, const std::vector<std::string>& argv,
                          const LaunchOptions& options, const LauncherSignals& signals);

/// Writes "tessera: TEXT" to options.error_fd, control characters escaped; waits 10 s at most.
void say(const LaunchOptions& options, std::string_view text);

}  // namespace tessera::tools
