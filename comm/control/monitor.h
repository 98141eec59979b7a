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
  Clock::time_point at;                          ///< arrival, adjusted by grant()
  std::uint64_t connection = 0;                  ///< the connection it arrived over
  std::optional<Clock::time_point> broken = {};  ///< when that connection broke
  RankState state = {};
  Clock::time_point arrived = at;
};

/// Moves the times of `beats` forward by `withheld`, the time in which this process could not run.
void grant(std::map<int, Beat>& beats, Beat::Clock::duration withheld, Beat::Clock::time_point now);

/// The last heartbeat of each rank. Thread-safe.
class BeatTable {
 public:
  /// @param connection  unique id
  void beat(int rank, RankState state, std::uint64_t connection);
  /// Notes that the connection broke, unless the rank has sent a heartbeat over another one since.
  void broken(int rank, std::uint64_t connection);
  void grant(Beat::Clock::duration withheld, Beat::Clock::time_point now);
  std::map<int, Beat> all() const;

 private:
  mutable std::mutex mutex_;
  std::map<int, Beat> beats_;
};

struct MonitorOptions {
  /// A rank without a heartbeat for this long counts as stopped. Zero: never.
  std::chrono::milliseconds silence{4000};
  /// A rank whose connection broke this long ago counts as ended. A launcher reports the end of a
  /// process sooner, with its cause.
  std::chrono::milliseconds broken{1500};
  /// A rank is slow if its compute time per step exceeds the median over ranks by this factor.
  double slow = 3;
  /// Window over which compute times are averaged.
  std::chrono::milliseconds slow_window{5000};
  /// This process, which serves the store.
  StoreHost server = {};
};

/// Returns an error that names lost or stopped ranks, if there are any. Pure.
std::optional<CommError> judge_beats(const std::map<int, Beat>& beats,
                                     std::chrono::steady_clock::time_point now,
                                     const MonitorOptions& options);

/// Detects that this process was suspended for so long that the other ranks exited because of it, so
/// that they are not blamed. Not thread-safe.
class OwnStop {
 public:
  using Clock = std::chrono::steady_clock;
  explicit OwnStop(const MonitorOptions& options) : options_(options) {}
  /// @param withheld  time withheld since the last call; see WithheldTime
  void look(Clock::duration withheld, Clock::time_point now);
  /// @param error  reports lost ranks
  /// @return `error`, or one that blames this process
  CommError judge(const CommError& error, const std::map<int, Beat>& beats,
                  Clock::time_point now) const;

 private:
  const MonitorOptions options_;
  Clock::time_point ended_{};
  Clock::duration stopped_{};  // zero: never
};

/// Finds slow ranks. Not thread-safe.
class SlowRanks {
 public:
  explicit SlowRanks(const MonitorOptions& options) : options_(options) {}
  /// @return a warning for each rank that was slow over the last window, at most one per minute and
  ///   rank
  std::vector<std::string> look(const std::map<int, Beat>& beats,
                                std::chrono::steady_clock::time_point now);

 private:
  const MonitorOptions options_;
  std::chrono::steady_clock::time_point began_{};
  std::map<int, RankState> before_;  // at the start of the window
  std::map<int, std::chrono::steady_clock::time_point> warned_at_;
};

/// Watches the heartbeats of a store's server on its own thread; publishes the first failure with
/// publish_verdict().
class Monitor {
 public:
  /// @param on_verdict  called on the monitor's thread after the verdict is published; may be null
  /// @param on_note     called on the monitor's thread with warnings to show; may be null
  Monitor(TcpStoreServer& server, const MonitorOptions& options,
          std::function<void(const CommError&)> on_verdict,
          std::function<void(const std::string&)> on_note);
  ~Monitor();
  /// Like OwnStop::judge(). Any thread.
  CommError judge(const CommError& error);
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  void watch();
  void look(Clock::time_point now);

  TcpStoreServer& server_;
  const MonitorOptions options_;
  const std::function<void(const CommError&)> on_verdict_;
  const std::function<void(const std::string&)> on_note_;
  std::mutex mutex_;
  WithheldTime withheld_;  // guarded by mutex_, like all below
  OwnStop own_stop_{options_};
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm
