#pragma once

namespace tessera::tools {

/// Turns SIGINT and SIGTERM into a request that the training loop reads: it stops after a step and
/// saves. A second signal of either kind ends the process at once. The handler's flag is the one
/// piece of process-wide state, as signals are process-wide.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// The signal that came, or 0.
  int received() const;
};

}  // namespace tessera::tools
