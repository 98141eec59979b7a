#pragma once

#include <algorithm>
#include <chrono>

namespace tessera::comm {

/// Measures time in which this process could not run (host suspended or overloaded), by reading the
/// clock at short intervals. Deadlines that blame a rank exclude this time.
class WithheldTime {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param interval  maximum time between two calls of look() in a running process
  /// @param now       counts as the first look()
  explicit WithheldTime(Clock::duration interval, Clock::time_point now = Clock::now())
      : allowed_(interval + std::chrono::milliseconds(20)), last_(now) {}
  /// @return time withheld since the last look
  Clock::duration look(Clock::time_point now) {
    const Clock::duration late = now - last_ - allowed_;
    last_ = now;
    return std::max(late, Clock::duration::zero());
  }

 private:
  const Clock::duration allowed_;
  Clock::time_point last_;
};

}  // namespace tessera::comm
