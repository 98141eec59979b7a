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

// Formats the most important metrics, as many as fit `width`.
std::string ProgressLine::line(const train::StepMetrics& m, std::size_t width) const {
  const auto total = fmt::format("{}", total_steps_);
  const double left_s = mean_step_ms_ * static_cast<double>(total_steps_ - m.step - 1) / 1000;
  std::string text = fmt::format("step {:>{}}/{}  loss {:.4f}  {} left", m.step + 1, total.size(),
                                 total, m.loss, format_duration(left_s));
  // MFU over the same interval as the rate.
  const std::string mfu = m.mfu && m.tokens_per_s > 0
                              ? fmt::format("  mfu {:.1f}%", 100 * *m.mfu * rate_ / m.tokens_per_s)
                              : std::string();
  for (const std::string& part :
       {fmt::format("  {} tok/s", format_count(rate_)), mfu, fmt::format("  epoch {:.2f}", m.epoch),
        fmt::format("  lr {:.2e}", m.lr), fmt::format("  grad {:.3g}", m.grad_norm),
        "  " + format_bytes(m.memory_bytes)}) {
    if (text.size() + part.size() > width) break;
    text += part;
  }
  return text;
}

void ProgressLine::update(const train::StepMetrics& metrics) {
  // The first steps are slow (cold caches): a short averaging window lets them fade quickly.
  const double weight =
      1.0 / std::min<double>(50.0, 1.0 + static_cast<double>(metrics.step - first_step_));
  mean_step_ms_ += weight * (metrics.step_ms - mean_step_ms_);
  const bool last = metrics.step + 1 == total_steps_;
  const bool prints =
      !style_.live && ((metrics.step + 1) % log_every_ == 0 || metrics.step == first_step_ || last);
  tokens_ += static_cast<double>(metrics.tokens);
  ms_ += metrics.step_ms;
  constexpr double kLiveInterval = 1000;  // ms
  if (prints || (style_.live && (rate_ == 0 || ms_ >= kLiveInterval))) {
    rate_ = ms_ > 0 ? tokens_ / ms_ * 1000 : 0;
    tokens_ = ms_ = 0;
  }
  if (!style_.live) {
    if (prints) write_line(line(metrics, std::string::npos));
    return;
  }
  const auto width = static_cast<std::size_t>(std::max(style_.width - 1, 0));
  shown_ = line(metrics, width);
  const auto now = std::chrono::steady_clock::now();
  // At most 15 redraws per second: a slow terminal must not slow down training.
  if (!last && now - drawn_ < std::chrono::milliseconds(66)) return;
  drawn_ = now;
  clear();
  // Truncate: a wrapped line can't be redrawn.
  out_ << std::string_view(shown_).substr(0, width) << std::flush;
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

// Writes the line at once, so that a killed process leaves no half line before another rank's line.
void ProgressLine::write_line(std::string_view text) {
  out_ << fmt::format("{}\n", text) << std::flush;
}

void ProgressLine::clear() { out_ << "\r\x1b[K"; }

}  // namespace tessera::tools
