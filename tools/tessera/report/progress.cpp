#include "tools/tessera/report/progress.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/memory.h"

namespace tessera::tools {

ProgressLine::ProgressLine(std::ostream& out, const ConsoleStyle& style, std::int64_t first_step,
                           std::int64_t total_steps, std::int64_t log_every)
    : out_(out),
      style_(style),
      first_step_(first_step),
      total_steps_(total_steps),
      log_every_(log_every) {}

ProgressLine::~ProgressLine() { finish(); }

std::string ProgressLine::line(const StepMetrics& m) const {
  const auto total = fmt::format("{}", total_steps_);
  const double left_s = mean_step_ms_ * static_cast<double>(total_steps_ - m.step - 1) / 1000;
  return fmt::format("step {:>{}}/{}  loss {:.4f}  grad {:.3g}  lr {:.2e}  {} tok/s  {}  {} left",
                     m.step + 1, total.size(), total, m.loss, m.grad_norm, m.lr,
                     format_count(m.tokens_per_s), format_bytes(m.memory_bytes),
                     format_duration(left_s));
}

void ProgressLine::update(const StepMetrics& metrics) {
  // The first steps are slow (cold caches), so the average follows quickly at first.
  const double weight =
      1.0 / std::min<double>(50.0, 1.0 + static_cast<double>(metrics.step - first_step_));
  mean_step_ms_ += weight * (metrics.step_ms - mean_step_ms_);
  const bool last = metrics.step + 1 == total_steps_;
  if (!style_.live) {
    if (metrics.step % log_every_ == 0 || last) write_line(line(metrics));
    return;
  }
  shown_ = line(metrics);
  const auto now = std::chrono::steady_clock::now();
  // 15 frames per second: a terminal over a slow link must not hold up steps of a millisecond.
  if (!last && now - drawn_ < std::chrono::milliseconds(66)) return;
  drawn_ = now;
  clear();
  // A line longer than the screen would wrap and could not be drawn over.
  out_ << std::string_view(shown_).substr(0, static_cast<std::size_t>(style_.width - 1))
       << std::flush;
}

void ProgressLine::note(std::string_view text) {
  if (style_.live) clear();
  write_line(text);
  drawn_ = {};
}

void ProgressLine::finish() {
  if (style_.live && !shown_.empty()) {
    clear();
    write_line(shown_);
    shown_.clear();
  }
}

// At once: should this process be killed between a text and its end, another rank's words would be
// on the same line.
void ProgressLine::write_line(std::string_view text) {
  out_ << fmt::format("{}\n", text) << std::flush;
}

void ProgressLine::clear() { out_ << "\r\x1b[K"; }

}  // namespace tessera::tools
