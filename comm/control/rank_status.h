#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::comm {

/// What a rank tells of itself with every heartbeat.
struct RankState {
  std::string process;  ///< "host, pid 12"
  std::string phase;    ///< "start", "load", "step", "save", ...
  std::int64_t step = -1;
  std::string collective;       ///< under way: "all_gather#12 (h.3)"; empty: none
  std::int64_t busy_us = 0;     ///< sum over steps of the time that it did not wait for others
  std::int64_t busy_steps = 0;  ///< these steps
  bool leaving = false;         ///< it ends in good order, or says itself why not

  /// "step 12, all_gather#88 (h.3)", "save of step 12", "start"
  std::string where() const;
  std::string encode() const;
  /// @return nothing if the text is none
  static std::optional<RankState> decode(std::string_view text);
};

/// The same as it changes. Thread-safe.
class RankStatus {
 public:
  explicit RankStatus(std::string process) { state_.process = std::move(process); }

  /// Also a fault point of that name.
  void enter(const char* phase, std::int64_t step = -1);
  /// Who is told of every phase from now on, first of the one that it is in; null: nobody.
  void on_enter(std::function<void(const std::string& phase, std::int64_t step)> tell);
  /// The step took so long, without waiting for other ranks.
  void worked(double seconds);
  void leave();
  /// Who is asked what collective is under way; null: nobody. When this returns, the former is not
  /// asked any more.
  void set_collective(std::function<std::string()> describe);
  RankState state() const;

 private:
  mutable std::mutex mutex_;
  RankState state_;
  std::function<void(const std::string&, std::int64_t)> tell_;
  std::function<std::string()> collective_;
};

}  // namespace tessera::comm
