#pragma once

#include <array>

namespace tessera::tools {

/// @return the exit code after a clean stop by `signal`: 128 + n; a SIGUSR1 asks for what a SIGTERM
/// does, and ends with its code, 143, so that scripts need to know one only
int stop_exit_code(int signal);

/// Keeps a SIGUSR1 that comes before there is a StopSignal for the first one, while it lives; also
/// one that was held back by a blocked signal since the process began, as the launcher arranges.
/// To be made before other threads. What comes after its end is ignored: the process is about to
/// end, and a warning is no reason to end it otherwise.
class HeldWarnings {
 public:
  HeldWarnings();
  ~HeldWarnings();
  HeldWarnings(const HeldWarnings&) = delete;
  HeldWarnings& operator=(const HeldWarnings&) = delete;
};

/// Turns SIGINT, SIGTERM and SIGUSR1 into a request that a loop reads: it stops where that costs
/// nothing, training after a step and a save. A SIGINT or SIGTERM that comes 1 s after another of
/// them, or later, ends the process at once; earlier ones belong to the same request: timeout(1)
/// and schedulers signal a process and its group, and the launcher passes on what reached it.
/// SIGUSR1 is a scheduler's warning: it ends nothing at once, and the first SIGINT or SIGTERM after
/// it is a request as if none had come. The handler's state is the one piece of process-wide state,
/// as signals are process-wide.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// The signal that came, or 0; the later one if it came after SIGUSR1.
  int received() const;

 private:
  std::array<void (*)(int), 3> before_{};
};

}  // namespace tessera::tools
