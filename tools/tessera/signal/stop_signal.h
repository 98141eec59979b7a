#pragma once

#include <array>
#include <cstdint>

namespace tessera::tools {

/// @return the exit code after a clean stop by `signal`: 128 + n, and 143 after SIGUSR1, as after
/// SIGTERM
int stop_exit_code(int signal);

/// Holds a SIGUSR1 that comes before there is a StopSignal, also one that was blocked since the
/// process began, for the first StopSignal. After its end SIGUSR1 is ignored. To be made before
/// other threads.
class HeldWarnings {
 public:
  HeldWarnings();
  ~HeldWarnings();
  HeldWarnings(const HeldWarnings&) = delete;
  HeldWarnings& operator=(const HeldWarnings&) = delete;
};

/// Turns SIGINT, SIGTERM and SIGUSR1 into a request that a loop reads and obeys where stopping
/// costs nothing. A SIGINT or SIGTERM 1 s or more after another of them ends the process at once;
/// an earlier one belongs to the same request, as timeout(1) and schedulers signal a process and
/// its group. SIGUSR1, a scheduler's warning, never ends the process, and the first SIGINT or
/// SIGTERM after it is a new request. One at a time: signals are process-wide.
class StopSignal {
 public:
  /// What a first signal stops, for the answer to the user.
  enum class Stage : std::uint8_t { Loading, Training, TrainingWithoutSaves };

  /// @param answers  say on standard error, in the handler, what a signal does
  explicit StopSignal(bool answers = false);
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// The signal that came, or 0; the later one if it came after SIGUSR1.
  int received() const;

  /// For the answers: the stage, the steps done, and the step of the newest checkpoint (-1: none).
  void set_progress(Stage stage, std::int64_t step, std::int64_t saved_step);

 private:
  std::array<void (*)(int), 3> before_{};
};

}  // namespace tessera::tools
