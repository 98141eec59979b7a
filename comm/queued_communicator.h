#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "comm/collective.h"
#include "comm/communicator.h"
#include "comm/control/agreement.h"
#include "comm/subgroup.h"

namespace tessera {
class Context;
}

namespace tessera::comm {

struct CommunicatorOptions {
  /// Default deadline of a collective.
  std::chrono::milliseconds timeout{120'000};
  /// Context whose memory ledger counts staging buffers; may be null.
  std::shared_ptr<Context> context = {};
  /// Publish a failure as the run's verdict, which ends the run on all ranks.
  bool ends_run = false;
};

/// Options of communicators between processes.
struct ConnectOptions {
  CommunicatorOptions communicator = {};
  /// Time for all ranks to connect.
  std::chrono::milliseconds connect_timeout{60'000};
  /// Prefix of the keys in the store; unique to the communicator.
  std::string name = {};
  /// Names of the ranks' processes for messages ("host, pid 12"), by world rank; may be empty.
  std::vector<std::string> processes = {};
  /// Set by Communicator::split(), like `verdict`. A subgroup's rank and world size are its own.
  Membership membership = {};
  /// Store key of the error that all ranks report. Empty: the run's verdict if a failure ends the
  /// run, else "NAME/failure".
  std::string verdict = {};

  const Subgroup* group() const { return membership.group.get(); }
  std::string verdict_key() const;
  /// An agreement of the group's members: "NAME/STEP".
  AgreementOptions agreement(std::string_view step) const;
  /// Makes these the options of a subgroup.
  void enter(const Membership& subgroup);
};

/// Transport of a QueuedCommunicator.
class CollectiveBackend {
 public:
  virtual ~CollectiveBackend() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::string_view name() const = 0;
  /// Prefix of the subgroups' keys, unique to this communicator.
  virtual std::string key() const = 0;
  /// Runs one collective on the queue's thread, within its deadline. The caller may reuse the
  /// buffers once this returns or throws. @throws CommError
  virtual void run(const Collective& collective) = 0;
  /// Makes a running collective throw soon. Any thread.
  virtual void interrupt(const CommError& reason) noexcept = 0;
  /// Maximum time of connect_subgroup().
  virtual std::chrono::milliseconds connect_timeout() const = 0;
  /// Connects this rank as `rank` of a subgroup. All members call it, on their callers' threads.
  /// @throws CommError or Unsupported naming ranks of the world
  virtual std::unique_ptr<CollectiveBackend> connect_subgroup(const Membership& subgroup,
                                                              int rank) = 0;
  /// Last call, on the queue's thread. Leaves the group and unblocks its peers, in bounded time.
  /// @param reason  failure of the communicator, or null
  virtual void close(const CommError* reason) noexcept = 0;
};

/// Runs collectives one after another on its own thread.
class QueuedCommunicator final : public Communicator, private FailureDomain::Member {
 public:
  QueuedCommunicator(std::unique_ptr<CollectiveBackend> backend, std::chrono::milliseconds timeout,
                     Membership membership = {});
  ~QueuedCommunicator() override;
  QueuedCommunicator(const QueuedCommunicator&) = delete;
  QueuedCommunicator& operator=(const QueuedCommunicator&) = delete;

  int rank() const override { return backend_->rank(); }
  int world_size() const override { return backend_->world_size(); }
  std::string_view backend() const override { return backend_->name(); }
  WorkPtr start(Collective collective) override;
  std::string under_way() const override;
  std::int64_t waited_ns() const override;
  void set_recorder(std::shared_ptr<FlightRecorder> recorder) override;
  void abort(std::string_view reason) noexcept override;
  void fail(const CommError& reason) noexcept override;
  std::unique_ptr<Communicator> split(const std::vector<int>& members,
                                      const std::string& kind) override;

 private:
  struct Caller;
  class QueuedWork;
  void work();
  int own_world_rank() const { return world_rank(membership_.group.get(), rank()); }
  void fail_alone(const CommError& reason) noexcept override;
  void check_alone() override {}
  std::string under_way_alone() const override;

  std::unique_ptr<CollectiveBackend> backend_;
  const std::chrono::milliseconds timeout_;
  const Membership membership_;
  const std::shared_ptr<Caller> caller_;  // shared with works, which may outlive this
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<QueuedWork>> queue_;
  std::optional<CommError> failure_;  // set once: the communicator is dead
  std::string died_in_;               // the collective that failed
  bool stop_ = false;
  std::uint64_t sequence_ = 0;
  std::uint64_t splits_ = 0;
  std::thread thread_;
};

}  // namespace tessera::comm
