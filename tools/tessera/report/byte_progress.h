#pragma once

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>

#include "tools/tessera/report/console.h"

namespace tessera::tools {

/// Shows percentage, rate and time left on standard error after the first 0.5 s. Redraws one line
/// on a terminal; elsewhere prints a line per 25% and per 30 s. Not thread-safe.
class ByteProgress {
 public:
  using Clock = std::chrono::steady_clock;

  explicit ByteProgress(std::string verb);
  /// @param out  must outlive this
  ByteProgress(std::string verb, std::ostream& out, const ConsoleStyle& style,
               Clock::time_point start);
  /// @param found  part of `done` that existed before the start; excluded from the rate
  void update(std::int64_t done, std::int64_t total, std::int64_t found = 0,
              Clock::time_point now = Clock::now());
  /// Adds a rate of items, such as tokens, to the line. @param number  since the start
  void set_items(std::int64_t number, std::string_view noun) {
    items_ = number;
    items_noun_ = noun;
  }
  /// Ends the live line of work that stops before `total`.
  void stop();

 private:
  std::string verb_;  // "read"
  std::ostream& out_;
  ConsoleStyle style_;
  Clock::time_point start_;
  Clock::time_point drawn_{};  // last redraw or print
  std::int64_t shown_ = 0;     // printed quarters
  std::int64_t items_ = 0;
  std::string items_noun_;
  bool visible_ = false;  // a line is on the terminal
};

}  // namespace tessera::tools
