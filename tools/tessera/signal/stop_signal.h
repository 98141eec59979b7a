#pragma once

namespace tessera::tools {

/// Turns SIGINT and SIGTERM into a request that a loop reads: it stops where that costs nothing,
/// training after a step and a save. A signal of either kind that comes 1 s later, or after that,
/// ends the process at once; earlier ones belong to the same request: timeout(1) and schedulers
/// signal a process and its group, and the launcher passes on what reached it. The handler's state
/// is the one piece of process-wide state, as signals are process-wide.
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
