#pragma once

#include <signal.h>

#include <chrono>
#include <string>
#include <vector>

#include "comm/control/socket.h"

namespace tessera::tools {

struct LaunchOptions {
  /// What the ranks run: by default this very program.
  std::string program = "/proc/self/exe";
  /// Where the launcher's own line and the other ranks' output go.
  int error_fd = 2;
  /// After a rank failed: the others' time to notice it and report, before SIGTERM.
  std::chrono::milliseconds notice{2000};
  /// A rank that gives no sign of life for so long ends the run. Zero: never. What the ranks allow
  /// this process, too.
  std::chrono::milliseconds heartbeat_timeout{4000};
  /// After a rank said that it leaves: its time to end.
  std::chrono::milliseconds leave{30'000};
  /// From SIGTERM to SIGKILL.
  std::chrono::milliseconds grace{800};
};

/// Starts `nproc` ranks on this host as child processes that run options.program with `argv`
/// (argv[0] included), serves their store, and waits for all to end.
///
/// The ranks get RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, TESSERA_RENDEZVOUS, TESSERA_RUN_ID
/// and TESSERA_TOKEN, a new secret without which nobody joins, and OMP_NUM_THREADS (an equal share
/// of the cores) unless it is set. They die with this process. Rank 0 writes to our standard output
/// and error; what the others write, to either, comes out on standard error, each line with "[rank
/// 1] " in front. SIGINT, SIGTERM and SIGUSR1 are passed on to all ranks; a SIGINT or SIGTERM that
/// comes 1 s after another of them, or later, ends them. A rank that exits with 130 or 143, though
/// nothing was passed on, was signalled itself, and all have agreed to stop: that is no failure
/// either.
///
/// When a rank fails, or its heartbeats stop, all ranks are told why, one line names the root
/// cause, and those that still run are ended. A rank that says that it leaves, and does not end, is
/// killed and named, and the others go on. If this process was itself stopped for so long that the
/// ranks gave it up, the line says that, and names no rank. A log that nobody reads delays nothing
/// but the end, by 10 s, and one that is read slowly by a minute; what it does not take is lost
/// then.
///
/// Call it before this process has other threads, so that they can't catch its signals.
///
/// @return 0 if all ranks ended with 0; 4 if a rank was killed by a signal; else the code of the
/// first rank that failed, where 4 (communication) gives way to any other: it follows from
/// somebody else's failure; stop_exit_code(n) if signal n was passed on, or agreed on, and all
/// ranks ended because of it; 4 if a rank had to be killed then
/// @throws InvalidArgument if nproc < 1; IoError if a process or pipe can't be made
int launch(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options = {});

/// Signals that a launcher takes for its ranks: blocked for a scope, and read through a descriptor.
/// SIGCHLD may have been ignored by who started us, which exec keeps: the kernel would then throw
/// the ranks' exit codes away.
class LauncherSignals {
 public:
  /// @throws IoError
  LauncherSignals();
  ~LauncherSignals();
  LauncherSignals(const LauncherSignals&) = delete;
  LauncherSignals& operator=(const LauncherSignals&) = delete;
  /// Readable when one has come; non-blocking.
  int fd() const { return fd_.get(); }
  /// The mask before the scope: what ranks get, but that SIGUSR1 is blocked until they unblock it.
  const sigset_t& before() const { return before_; }

 private:
  sigset_t before_;
  struct sigaction child_before_ {};
  comm::FileDescriptor fd_;
};

/// How ranks that were started together ended.
struct LaunchOutcome {
  int code = 0;         ///< as launch() returns it
  int signal = 0;       ///< that was passed on, or by which the ranks agreed to stop; 0: none
  bool failed = false;  ///< beyond signals
  int culprit = -1;     ///< the rank that failed first; -1: none, or nobody knows
  std::string failure;  ///< "rank 1 was killed by SIGKILL"; empty: none failed
};

/// launch() for who starts ranks again: signals that come between two calls wait in `signals`.
LaunchOutcome launch_once(int nproc, const std::vector<std::string>& argv,
                          const LaunchOptions& options, const LauncherSignals& signals);

}  // namespace tessera::tools
