#include "tools/tessera/report/byte_progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>

#include "core/base/memory.h"

namespace tessera::tools {

ByteProgress::ByteProgress(std::string verb)
    : ByteProgress(std::move(verb), std::cerr, detect_console(STDERR_FILENO), Clock::now()) {}

ByteProgress::ByteProgress(std::string verb, std::ostream& out, const ConsoleStyle& style,
                           Clock::time_point start)
    : verb_(std::move(verb)), out_(out), style_(style), start_(start) {}

void ByteProgress::update(std::int64_t done, std::int64_t total, std::int64_t found,
                          Clock::time_point now) {
  const double seconds = std::max(std::chrono::duration<double>(now - start_).count(), 1e-3);
  if (seconds < 0.5 && !visible_) return;
  const double rate = static_cast<double>(done - found) / seconds;
  const std::int64_t percent = total > 0 ? done * 100 / total : 100;
  const auto line = [&] {
    std::string text =
        fmt::format("{:3}%  {} of {} {}, {}/s", percent, format_bytes(done), format_bytes(total),
                    verb_, format_bytes(static_cast<std::int64_t>(rate)));
    if (items_ > 0)
      text += fmt::format(", {} {}/s", format_count(static_cast<double>(items_) / seconds),
                          items_noun_);
    if (found > 0) text += fmt::format(", {} already done", format_bytes(found));
    if (done > found && done < total) {
      text += fmt::format(", {} left", format_duration(static_cast<double>(total - done) / rate));
    }
    return text;
  };
  if (style_.live) {
    if (now - drawn_ < std::chrono::milliseconds(100) && done < total) return;
    drawn_ = now;
    visible_ = done < total;
    out_ << fmt::format("\r{}\x1b[K{}", line(), visible_ ? "" : "\n") << std::flush;
  } else if (percent / 25 > shown_ || now - std::max(drawn_, start_) >= std::chrono::seconds(30)) {
    shown_ = percent / 25;
    drawn_ = now;
    out_ << fmt::format("{}\n", line()) << std::flush;
  }
}

void ByteProgress::stop() {
  if (visible_) out_ << '\n' << std::flush;
  visible_ = false;
}

}  // namespace tessera::tools
