#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::comm {

/// A rank's activity, sent with every heartbeat.
struct RankState {
  std::string process;  ///< "host, pid 12"
  std::string phase;    ///< "start", "load", "step", "save", ...
  std::int64_t step = -1;
  std::string collective;       ///< the running one: "all_gather#12 (h.3)"; empty: none
  std::int64_t busy_us = 0;     ///< compute time of all steps, without waits for other ranks
  std::int64_t busy_steps = 0;  ///< number of these steps
  bool leaving = false;         ///< the rank exits cleanly or reports its own failure

  /// "step 12, all_gather#88 (h.3)", "save of step 12", "start"
  std::string where() const;
  std::string encode() const;
  /// @return nothing if the text is malformed
  static std::optional<RankState> decode(std::string_view text);
};

/// The RankState of this process. Thread-safe.
class RankStatus {
 public:
  explicit RankStatus(std::string process) { state_.process = std::move(process); }

  /// Starts a phase, which is also a fault point of that name.
  void enter(const char* phase, std::int64_t step = -1);
  /// Calls `listener` with the current phase and every later one; null: stops.
  void on_enter(std::function<void(const std::string& phase, std::int64_t step)> listener);
  /// Adds one step's compute time.
  void worked(double seconds);
  void leave();
  /// Sets the source of RankState::collective; null: none. The previous source is not called after
  /// this returns.
  void set_collective(std::function<std::string()> describe);
  RankState state() const;

 private:
  mutable std::mutex mutex_;
  RankState state_;
  std::function<void(const std::string&, std::int64_t)> listener_;
  std::function<std::string()> collective_;
};

}  // namespace tessera::comm
