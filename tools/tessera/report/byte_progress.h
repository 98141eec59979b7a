#pragma once

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>

#include "tools/tessera/report/console.h"

namespace tessera::tools {

/// Shows on standard error how far bytes have been read or copied: percentage, rate and time left.
/// One line that is drawn over on a terminal, else a line a quarter and each half minute; nothing
/// of what takes under half a second. Not thread-safe.
class ByteProgress {
 public:
  using Clock = std::chrono::steady_clock;

  explicit ByteProgress(std::string verb);
  /// The same for another stream, which outlives this, and from a time that is given.
  ByteProgress(std::string verb, std::ostream& out, const ConsoleStyle& style,
               Clock::time_point start);
  /// @param found  of `done`, what was there already: it tells nothing of the rate
  void update(std::int64_t done, std::int64_t total, std::int64_t found = 0,
              Clock::time_point now = Clock::now());
  /// Leaves the line on the screen, where work ends before `total`.
  void stop();

 private:
  std::string verb_;  // "read"
  std::ostream& out_;
  ConsoleStyle style_;
  Clock::time_point start_;
  Clock::time_point drawn_{};  // or printed
  std::int64_t shown_ = 0;     // quarters
  bool visible_ = false;       // a line is on the terminal
};

}  // namespace tessera::tools
