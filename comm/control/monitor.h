#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/control/rank_status.h"
#include "comm/control/store.h"
#include "comm/control/withheld_time.h"
#include "core/base/error.h"

namespace tessera::comm {

class TcpStoreServer;

/// The last heartbeat of a rank.
struct Beat {
  using Clock = std::chrono::steady_clock;
  Clock::time_point at;                          ///< when it came
  std::uint64_t connection = 0;                  ///< over which
  std::optional<Clock::time_point> broken = {};  ///< since when its connection is, if it is
  RankState state = {};
};

/// Heartbeats as they come. Thread-safe.
class BeatTable {
 public:
  /// @param connection  over which it came: a number that is not used again
  void beat(int rank, RankState state, std::uint64_t connection);
  /// That connection is gone. It says nothing of a rank that has come over another one since.
  void broken(int rank, std::uint64_t connection);
  std::map<int, Beat> all() const;

 private:
  mutable std::mutex mutex_;
  std::map<int, Beat> beats_;
};

struct MonitorOptions {
  /// A rank that says nothing for so long is taken for stopped. Zero: never.
  std::chrono::milliseconds silence{4000};
  /// A rank whose connection broke, for so long, ended without a word. Who watches its process
  /// knows more, and says so sooner.
  std::chrono::milliseconds broken{1500};
  /// Own time of a rank's steps, as a multiple of the median of all ranks, from which on it is
  /// called slow.
  double slow = 3;
  /// Over how long that is measured.
  std::chrono::milliseconds slow_window{5000};
  /// Who runs the monitor.
  StoreHost server = {};
};

/// Who is to blame, if anybody is. Pure.
/// @param beats  by rank, of those that have ever sent one
std::optional<CommError> judge_beats(const std::map<int, Beat>& beats,
                                     std::chrono::steady_clock::time_point now,
                                     const MonitorOptions& options);

/// What ranks say, and this process must, that was stopped for so long that they gave it up: nobody
/// else is to blame.
CommError given_up(const StoreHost& server, std::chrono::steady_clock::duration stopped);

/// Tells ranks that were lost because this process was stopped, and they gave it up, from those
/// that ended. Not thread-safe.
class OwnStop {
 public:
  using Clock = std::chrono::steady_clock;
  explicit OwnStop(const MonitorOptions& options) : options_(options) {}
  /// @param withheld  since the last call: see WithheldTime
  void look(Clock::duration withheld, Clock::time_point now);
  /// @param error  that ranks were lost
  /// @param beats  as they came, without any Allowance
  /// @return it, or what to say instead
  CommError judge(const CommError& error, const std::map<int, Beat>& beats,
                  Clock::time_point now) const;

 private:
  const MonitorOptions options_;
  Clock::time_point ended_{};
  Clock::duration stopped_{};  // zero: never
};

/// Finds ranks that hold the others up. Not thread-safe.
class SlowRanks {
 public:
  explicit SlowRanks(const MonitorOptions& options) : options_(options) {}
  /// @return a sentence for each rank that was slow over the last window, at most one a minute and
  /// rank
  std::vector<std::string> look(const std::map<int, Beat>& beats,
                                std::chrono::steady_clock::time_point now);

 private:
  const MonitorOptions options_;
  std::chrono::steady_clock::time_point began_{};
  std::map<int, RankState> before_;  // at the window's begin
  std::map<int, std::chrono::steady_clock::time_point> told_;
};

/// Watches the heartbeats that a store's server receives, on a thread of its own, and tells all
/// ranks who is to blame as soon as somebody is; once.
class Monitor {
 public:
  /// @param on_verdict  on the monitor's thread, after the verdict is published; may be null
  /// @param on_note     on the monitor's thread: what people should know; may be null
  Monitor(TcpStoreServer& server, const MonitorOptions& options,
          std::function<void(const CommError&)> on_verdict,
          std::function<void(const std::string&)> on_note);
  ~Monitor();
  /// What to say of ranks that were lost: that, or that they gave up this process. Any thread.
  CommError judge(const CommError& error);
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  void watch();
  void look_locked(Clock::time_point now);

  TcpStoreServer& server_;
  const MonitorOptions options_;
  const std::function<void(const CommError&)> on_verdict_;
  const std::function<void(const std::string&)> on_note_;
  std::mutex mutex_;
  WithheldTime withheld_;  // guarded by mutex_, as all below
  Clock::duration not_granted_{};
  OwnStop own_stop_{options_};
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm
