#pragma once

#include <signal.h>

#include "comm/control/socket.h"

namespace tessera::tools {

/// Blocks SIGINT, SIGTERM, SIGUSR1 and SIGCHLD for a scope and reads them from a descriptor. Resets
/// SIGCHLD to its default action: if it were ignored, the ranks' exit codes would be lost.
class LauncherSignals {
 public:
  struct Signal {
    int number = 0;            ///< 0: none is pending
    bool by_terminal = false;  ///< sent to the whole process group, by Ctrl-C
  };

  /// @throws IoError
  LauncherSignals();
  ~LauncherSignals();
  LauncherSignals(const LauncherSignals&) = delete;
  LauncherSignals& operator=(const LauncherSignals&) = delete;
  /// Readable when a signal is pending.
  int fd() const { return fd_.get(); }
  /// Takes the next pending signal, without blocking; an empty one if none is left. SIGCHLD is
  /// skipped.
  Signal next() const;
  /// The previous signal mask; with SIGUSR1, if `blocks_warnings`.
  sigset_t mask_of_ranks(bool blocks_warnings) const;

 private:
  sigset_t before_;
  struct sigaction child_before_ {};
  comm::FileDescriptor fd_;
};

}  // namespace tessera::tools
