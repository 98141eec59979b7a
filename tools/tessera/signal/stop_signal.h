#pragma once

#include <array>
#include <cstdint>

namespace tessera::tools {

/// Exit code after a clean stop by `signal`: 128 + signal; for SIGUSR1 143, as for SIGTERM.
int stop_exit_code(int signal);

/// Blocks or unblocks SIGUSR1. @param how  SIG_BLOCK or SIG_UNBLOCK
void mask_warnings(int how);

/// Records an early SIGUSR1, even one pending since the process started, for the first StopSignal.
/// The destructor makes the process ignore SIGUSR1. Create it before other threads.
class HeldWarnings {
 public:
  HeldWarnings();
  ~HeldWarnings();
  HeldWarnings(const HeldWarnings&) = delete;
  HeldWarnings& operator=(const HeldWarnings&) = delete;
};

/// Turns SIGINT, SIGTERM and SIGUSR1 into a stop request that the training loop polls. A second
/// SIGINT or SIGTERM kills the process, but only 1 s or more after the first: timeout(1) and
/// schedulers signal both a process and its group, so one request can arrive twice. SIGUSR1, a
/// scheduler's warning, never kills the process; SIGINT or SIGTERM after it is a new first request.
/// One instance at a time: signals are process-wide.
class StopSignal {
 public:
  /// Selects the message printed on a signal.
  enum class Stage : std::uint8_t { Loading, Training, TrainingWithoutSaves };

  /// @param answers  print the effect of a signal on standard error, from the handler
  explicit StopSignal(bool answers = false);
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// The received signal, or 0. SIGINT and SIGTERM replace an earlier SIGUSR1.
  int received() const;

  /// Updates the facts for messages: stage and steps done.
  void set_progress(Stage stage, std::int64_t step);
  /// Step of the newest checkpoint, -1: none. Thread-safe.
  static void set_saved(std::int64_t step);

 private:
  std::array<void (*)(int), 3> before_{};
};

}  // namespace tessera::tools
