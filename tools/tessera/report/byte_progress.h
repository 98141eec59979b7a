#pragma once

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>

#include "tools/tessera/report/console.h"

namespace tessera::tools {

/// Shows the progress of reading or copying on standard error: percentage, rate and time left. On a
/// terminal one line that is redrawn, elsewhere a line per quarter and per half minute; nothing in
/// the first half second. Not thread-safe.
class ByteProgress {
 public:
  using Clock = std::chrono::steady_clock;

  explicit ByteProgress(std::string verb);
  /// For another stream, which must outlive this, and a given start.
  ByteProgress(std::string verb, std::ostream& out, const ConsoleStyle& style,
               Clock::time_point start);
  /// @param found  part of `done` that was there already and does not count for the rate
  void update(std::int64_t done, std::int64_t total, std::int64_t found = 0,
              Clock::time_point now = Clock::now());
  /// Ends the line if the work stops before `total`.
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
