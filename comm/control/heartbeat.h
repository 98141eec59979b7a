#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "comm/control/rank_status.h"
#include "comm/control/store.h"
#include "core/base/error.h"

namespace tessera::comm {

struct HeartbeatOptions {
  std::chrono::milliseconds period{1000};
  /// Whoever serves the store and does not answer for so long is lost.
  std::chrono::milliseconds silence{4000};
  /// Who serves the store: "the launcher", "rank 0 (host, pid 12)".
  StoreHost server = {};
  /// On the heartbeat's thread, once: the run has failed, and this is why. Nothing that waits may
  /// be called from it.
  std::function<void(const CommError&)> on_verdict;
  /// On the heartbeat's thread, after on_verdict: it is this rank's own, as who serves the store
  /// does not answer; whatever waits for the store need not.
  std::function<void()> on_lost;
  /// A process that is still there so long after the verdict is ended by on_stuck, before a
  /// launcher does it without a word.
  std::chrono::milliseconds leave_within{1800};
  /// On the heartbeat's thread: ends the process.
  std::function<void(const CommError&)> on_stuck;
};

/// Tells who serves the store, every period and on a thread of its own, that this rank is alive and
/// what it does, and learns within milliseconds that the run has failed, whatever the other threads
/// are doing.
class Heartbeat {
 public:
  /// @param store  a connection of its own: see Store::separate()
  Heartbeat(std::shared_ptr<Store> store, int rank, std::shared_ptr<RankStatus> status,
            HeartbeatOptions options);
  /// Says that this rank leaves; from then on nobody expects a heartbeat of it. Within
  /// options.silence and a second, whatever became of the store.
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;
  /// What on_verdict is told, if it is by then.
  std::optional<CommError> verdict(std::chrono::milliseconds at_most = {});

 private:
  void run();
  /// @return the verdict, or nothing if this rank leaves before there is one
  std::optional<CommError> watch();
  /// @return the verdict, if there is one by then
  std::optional<CommError> wait_for_verdict(std::chrono::milliseconds at_most);
  bool sleep(std::chrono::milliseconds time);
  CommError lost(std::string_view why) const;

  const std::shared_ptr<Store> store_;
  const int rank_;
  const std::shared_ptr<RankStatus> status_;
  const HeartbeatOptions options_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::optional<CommError> verdict_;
  bool stop_ = false, ended_ = false;
  bool is_lost_ = false;  // the thread's own
  std::thread thread_;
};

}  // namespace tessera::comm
