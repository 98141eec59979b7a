#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>

namespace tessera::comm {

struct Beat;

/// Time in which this process could not run, found by looking at the clock at short intervals: its
/// host was suspended, or its processors were given to others. Who is waited for had no more of
/// them, so waits that end in blame or by force do not count it.
class WithheldTime {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param interval  at most so long, and the time that waking up takes, lies between two looks if
  /// nothing is withheld
  /// @param now  counts as the first look: a process may be stopped before it comes to another
  explicit WithheldTime(Clock::duration interval, Clock::time_point now = Clock::now())
      : allowed_(interval + std::chrono::milliseconds(20)), last_(now) {}
  /// @return what was withheld since the last look
  Clock::duration look(Clock::time_point now) {
    const Clock::duration late = now - last_ - allowed_;
    last_ = now;
    return std::max(late, Clock::duration::zero());
  }

 private:
  const Clock::duration allowed_;
  Clock::time_point last_;
};

/// Heartbeats as if no time had been withheld since they came. Not thread-safe.
class Allowance {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param beats    by rank, all that there are; each moves by what was withheld since it came
  /// @param withheld since the last call
  void grant(std::map<int, Beat>& beats, Clock::duration withheld, Clock::time_point now);

 private:
  struct Granted {
    Clock::time_point at;
    std::optional<Clock::time_point> broken;
    Clock::duration silent{}, lost{};
  };
  std::map<int, Granted> granted_;
};

}  // namespace tessera::comm
