#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "comm/nccl.h"
#include "comm/nccl/call_comparison.h"
#include "comm/nccl/inquiry.h"
#include "comm/nccl/pending.h"

namespace tessera::comm {

/// A timed mutex that the thread sanitizer supports (GCC 12's does not support std::timed_mutex).
class TimedTurn {
 public:
  void lock() {
    std::unique_lock lock(mutex_);
    free_.wait(lock, [this] { return !taken_; });
    taken_ = true;
  }
  bool try_lock() {
    const std::lock_guard lock(mutex_);
    return !std::exchange(taken_, true);
  }
  bool try_lock_until(std::chrono::steady_clock::time_point end) {
    std::unique_lock lock(mutex_);
    if (!free_.wait_until(lock, end, [this] { return !taken_; })) return false;
    taken_ = true;
    return true;
  }
  void unlock() {
    const std::lock_guard lock(mutex_);
    taken_ = false;
    free_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  bool taken_ = false;
};

/// Exponential backoff for polling: 10 us to 1 ms.
class Pause {
 public:
  std::chrono::microseconds next() {
    return std::exchange(pause_, std::min(2 * pause_, std::chrono::microseconds(1000)));
  }

 private:
  std::chrono::microseconds pause_{10};
};

/// State shared by the caller's thread, the prober and the watchdog.
///
/// The prober polls the device and NCCL, and aborts NCCL after a failure; these calls may block.
/// The watchdog makes no such calls: it enforces deadlines, exchanges positions with peers, and
/// decides whether communication has failed. `failure_` is set before the abort, so that work is
/// valid if no failure is set when it completes.
class NcclCore final : public std::enable_shared_from_this<NcclCore>, public FailureDomain::Member {
 public:
  using Clock = std::chrono::steady_clock;

  NcclCore(std::unique_ptr<NcclDriver> driver, std::shared_ptr<Store> store, int rank,
           int world_size, NcclOptions options);

  /// Connects all ranks; call start_threads() next. @throws as make_nccl_communicator()
  void connect();
  void start_threads();
  /// Ends the threads. If an unfinished collective was never waited for, aborts all; else lets them
  /// finish, each within its deadline, all within communicator.timeout + grace.
  void shut_down() noexcept;

  struct Call {
    std::shared_ptr<NcclItem> item;  ///< as named in messages
    Collective call;                 ///< as NCCL runs it
  };
  /// Queues at least one collective as one launch, after the copies of staged inputs.
  void run(std::span<const Call> group);
  void wait(NcclItem& item);
  bool is_done(const NcclItem& item) const noexcept;
  /// Throws the failure, if any; after the first time as CommError(Aborted).
  void check_alive();
  /// Connects this rank as `rank` of a subgroup. @throws as make_nccl_communicator()
  std::shared_ptr<NcclCore> connect_subgroup(const Membership& subgroup, int rank) const;

  void fail_alone(const CommError& error) noexcept override;
  void check_alone() override { check_alive(); }

  const NcclOptions& options() const { return options_; }
  Context& context() const { return *options_.communicator.context; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const Membership& membership() const { return options_.membership; }
  FailureDomain& domain() const { return *options_.membership.domain; }
  int own_world_rank() const { return world_rank(options_.group(), rank_); }

 private:
  std::optional<CommError> initialize(Clock::time_point end);
  void abort_in_time();
  void compare(const NcclLaunch& launch);
  void enqueue(std::span<const Collective> calls, const Collective& collective);
  [[noreturn]] void report(const NcclSuspicion& suspicion);
  [[noreturn]] void throw_failure();

  void probe();
  std::optional<NcclSuspicion> look();
  void close_driver();

  void watch();
  bool is_noticed_in_time(std::unique_lock<std::mutex>& lock);
  NcclPosition position() const;

  const NcclOptions options_;
  const int rank_, world_size_;
  const std::shared_ptr<Store> store_;
  const std::unique_ptr<NcclDriver> driver_;
  CallComparison comparison_;
  PendingCollectives pending_;
  std::shared_ptr<NcclLaunch> launching_;  // used by the caller
  NcclInquiry inquiry_;                    // used by the watchdog
  std::atomic<std::uint64_t> called_ = 0;  // number of launches

  TimedTurn nccl_;  // held during calls to NCCL
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  /// A launch that the caller's thread is making, which may block while NCCL waits for peers.
  struct Calling {
    Collective collective;
    Clock::time_point since;
  };
  void set_calling(std::optional<Calling> calling);
  std::optional<Calling> calling_;
  std::optional<NcclSuspicion> suspicion_;
  std::optional<CommError> failure_;
  std::optional<Clock::time_point> probing_since_, stopping_since_, closing_since_;
  bool noticed_ = false;  // the caller has received the failure
  bool stop_ = false;
  bool is_closed_ = false;  // the prober is done with NCCL
  std::thread prober_, watchdog_;
};

}  // namespace tessera::comm
