#pragma once

#include <algorithm>
#include <chrono>

namespace tessera::comm {

/// Time in which this process could not run, as its host was suspended or gave its processors to
/// others; found by reading the clock at short intervals. Deadlines that end in blame exclude it.
class WithheldTime {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param interval  the longest time between two looks of a process that runs
  /// @param now       counts as the first look
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
