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
  /// The store's server counts as lost after this long without an answer.
  std::chrono::milliseconds silence{4000};
  /// The process that serves the store: "the launcher", "rank 0 (host, pid 12)".
  StoreHost server = {};
  /// Called once, on the heartbeat's thread, when the run fails. Must not block.
  std::function<void(const CommError&)> on_verdict;
  /// Called after on_verdict if the store is unreachable. Must cancel everything that waits on it.
  std::function<void()> on_lost;
  /// Time from the verdict to on_stuck; shorter than a launcher's time until it kills the process.
  std::chrono::milliseconds leave_within{1800};
  /// Must end the process, which should have exited by then. Called on the heartbeat's thread.
  std::function<void(const CommError&)> on_stuck;
};

/// Sends this rank's state to the server every period and receives verdicts within milliseconds, on
/// its own thread.
class Heartbeat {
 public:
  /// @param store  a connection that nothing else uses; see Store::separate()
  Heartbeat(std::shared_ptr<Store> store, int rank, std::shared_ptr<RankStatus> status,
            HeartbeatOptions options);
  /// Announces that this rank leaves, so that the server expects no more heartbeats. Returns within
  /// options.silence + 1 s, even if the store is lost.
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;
  /// Waits up to `at_most` for the verdict.
  std::optional<CommError> verdict(std::chrono::milliseconds at_most = {});

 private:
  void run();
  /// @return the verdict; nothing if this rank leaves first
  std::optional<CommError> watch();
  /// @return the verdict, if it arrives in time
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
  bool is_lost_ = false;  // used by thread_ only
  std::thread thread_;
};

}  // namespace tessera::comm
