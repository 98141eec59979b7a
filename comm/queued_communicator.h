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
  /// Names of the ranks' processes for messages ("host, pid 12"), by rank; may be empty.
  std::vector<std::string> processes = {};
};

/// Transport of a QueuedCommunicator.
class CollectiveBackend {
 public:
  virtual ~CollectiveBackend() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::string_view name() const = 0;
  /// Runs one collective on the queue's thread, within its deadline. The caller may reuse the
  /// buffers once this returns or throws. @throws CommError
  virtual void run(const Collective& collective) = 0;
  /// Makes a running collective throw soon. Any thread.
  virtual void interrupt(const CommError& reason) noexcept = 0;
  /// Last call, on the queue's thread. Leaves the group and unblocks its peers, in bounded time.
  /// @param reason  failure of the communicator, or null
  virtual void close(const CommError* reason) noexcept = 0;
};

/// Runs collectives one after another on its own thread.
class QueuedCommunicator final : public Communicator {
 public:
  QueuedCommunicator(std::unique_ptr<CollectiveBackend> backend, std::chrono::milliseconds timeout);
  ~QueuedCommunicator() override;
  QueuedCommunicator(const QueuedCommunicator&) = delete;
  QueuedCommunicator& operator=(const QueuedCommunicator&) = delete;

  int rank() const override { return backend_->rank(); }
  int world_size() const override { return backend_->world_size(); }
  std::string_view backend() const override { return backend_->name(); }
  WorkPtr start(Collective collective) override;
  std::string under_way() const override;
  std::int64_t waited_ns() const override { return waited_ns_->load(); }
  void set_recorder(std::shared_ptr<FlightRecorder> recorder) override;
  void abort(std::string_view reason) noexcept override;
  void fail(const CommError& reason) noexcept override;

 private:
  class QueuedWork;
  void work();
  CommError aborted_error() const;

  std::unique_ptr<CollectiveBackend> backend_;
  const std::chrono::milliseconds timeout_;
  // Shared with works, which may outlive the communicator.
  const std::shared_ptr<std::atomic<std::int64_t>> waited_ns_ =
      std::make_shared<std::atomic<std::int64_t>>(0);
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<QueuedWork>> queue_;
  std::optional<CommError> failure_;  // set once: the communicator is dead
  bool reported_ = false;             // failure_ was thrown to the caller
  std::string died_in_;               // the collective that failed
  std::shared_ptr<FlightRecorder> recorder_;
  bool stop_ = false;
  std::uint64_t sequence_ = 0;
  std::thread thread_;
};

}  // namespace tessera::comm
