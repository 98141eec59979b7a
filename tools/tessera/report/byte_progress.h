#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "tools/tessera/report/console.h"

namespace tessera::tools {

/// Shows on standard error how far bytes have been read or copied: percentage, rate and time left.
/// One line that is drawn over on a terminal, else a line a quarter; nothing of what takes under
/// half a second. Not thread-safe.
class ByteProgress {
 public:
  explicit ByteProgress(std::string verb) : verb_(std::move(verb)) {}
  void update(std::int64_t done, std::int64_t total);

 private:
  std::string verb_;  // "read"
  ConsoleStyle style_ = detect_console(2);
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point drawn_{};
  std::int64_t shown_ = 0;  // quarters
  bool visible_ = false;    // a line is on the terminal
};

}  // namespace tessera::tools
