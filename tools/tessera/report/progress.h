#pragma once

#include <chrono>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

#include "tools/tessera/report/console.h"
#include "tools/tessera/report/metrics.h"

namespace tessera::tools {

/// Shows a run's steps: on a terminal one line that is drawn over, elsewhere a plain line every
/// `log_every` steps and for the last. Lines are ended by note() and finish(). Not thread-safe.
class ProgressLine {
 public:
  /// @param first_step  the step that comes first, for "3 s left": > 0 for a resumed run
  /// @param total_steps  steps of the whole run
  ProgressLine(std::ostream& out, const ConsoleStyle& style, std::int64_t first_step,
               std::int64_t total_steps, std::int64_t log_every);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void update(const StepMetrics& metrics);
  /// A line that stays: an evaluation, a checkpoint, a warning. The live line goes on below it.
  void note(std::string_view text);
  /// Leaves the last state of the live line on the screen. Idempotent.
  void finish();

 private:
  std::string line(const StepMetrics& metrics) const;
  void write_line(std::string_view text);
  void clear();

  std::ostream& out_;
  ConsoleStyle style_;
  std::int64_t first_step_;
  std::int64_t total_steps_;
  std::int64_t log_every_;
  double mean_step_ms_ = 0;  // moving average, for the time left
  std::string shown_;        // the live line; empty: none on the screen
  std::chrono::steady_clock::time_point drawn_{};
};

}  // namespace tessera::tools
