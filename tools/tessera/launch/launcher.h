#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace tessera::tools {

struct LaunchOptions {
  /// What the ranks run: by default this very program.
  std::string program = "/proc/self/exe";
  /// Where the launcher's own line and the other ranks' output go.
  int error_fd = 2;
  /// After a rank failed: the others' time to notice it and report, before SIGTERM.
  std::chrono::milliseconds notice{500};
  /// From SIGTERM to SIGKILL.
  std::chrono::milliseconds grace{1500};
};

/// Starts `nproc` ranks on this host as child processes that run options.program with `argv`
/// (argv[0] included), serves their store, and waits for all to end.
///
/// The ranks get RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, TESSERA_RENDEZVOUS and
/// TESSERA_RUN_ID, and OMP_NUM_THREADS (an equal share of the cores) unless it is set. They die
/// with this process. Rank 0 writes to our standard output and error; what the others write, to
/// either, comes out on standard error, each line with "[rank 1] " in front. SIGINT and SIGTERM are
/// passed on to all ranks; a second one, 1 s later or after that, ends them.
///
/// When a rank fails, one line names the root cause, and those that still run are ended.
///
/// Call it before this process has other threads, so that they can't catch its signals.
///
/// @return 0 if all ranks ended with 0; 4 if a rank was killed by a signal; else the code of the
/// first rank that failed, where 4 (communication) gives way to any other: it follows from
/// somebody else's failure; 128 + n if signal n was passed on and all ranks ended because of it
/// @throws InvalidArgument if nproc < 1; IoError if a process or pipe can't be made
int launch(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options = {});

}  // namespace tessera::tools
