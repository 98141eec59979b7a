#pragma once

#include <chrono>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

#include "tools/tessera/report/console.h"
#include "train/metrics.h"

namespace tessera::tools {

/// Shows training progress: redraws one line on a terminal; elsewhere prints the first, the last
/// and every `log_every`-th step. "step 10/50" means that 10 steps are done. Averages tokens/s
/// since the previous line. Not thread-safe.
class ProgressLine {
 public:
  /// @param first_step  > 0 for a resumed run
  ProgressLine(std::ostream& out, const ConsoleStyle& style, std::int64_t first_step,
               std::int64_t total_steps, std::int64_t log_every);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void update(const train::StepMetrics& metrics);
  /// Prints a permanent line: an evaluation, a checkpoint, a warning.
  void note(std::string_view text);
  /// Leaves the last state of the live line on the screen. Idempotent.
  void finish();

 private:
  std::string line(const train::StepMetrics& metrics, std::size_t width) const;
  void write_line(std::string_view text);
  void clear();

  std::ostream& out_;
  ConsoleStyle style_;
  std::int64_t first_step_;
  std::int64_t total_steps_;
  std::int64_t log_every_;
  double mean_step_ms_ = 0;     // moving average, for the time left
  double tokens_ = 0, ms_ = 0;  // since the rate was last computed
  double rate_ = 0;             // tokens per second
  std::string shown_;           // the live line; empty: none on the screen
  std::chrono::steady_clock::time_point drawn_{};
};

}  // namespace tessera::tools
