#include "comm/queued_communicator.h"

#include <utility>

#include "comm/flight_recorder.h"
#include "core/base/fault_point.h"

namespace tessera::comm {

class QueuedCommunicator::QueuedWork final : public Work {
 public:
  QueuedWork(Collective c, std::shared_ptr<std::atomic<std::int64_t>> waited_ns)
      : collective(std::move(c)), waited_ns_(std::move(waited_ns)) {}
  bool is_done() const override { return done_.load(std::memory_order_acquire); }
  void wait() override {
    std::unique_lock lock(mutex_);
    if (!is_done()) {
      const auto start = std::chrono::steady_clock::now();
      finished_.wait(lock, [&] { return is_done(); });
      *waited_ns_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    }
    if (error_) throw CommError(*error_);
  }
  void finish(const CommError* error) {
    const std::lock_guard lock(mutex_);
    if (error != nullptr) error_ = *error;
    done_.store(true, std::memory_order_release);
    finished_.notify_all();  // under the lock, because the waiter may destroy this at once
  }

  const Collective collective;

 private:
  const std::shared_ptr<std::atomic<std::int64_t>> waited_ns_;
  std::mutex mutex_;
  std::condition_variable finished_;
  std::atomic<bool> done_{false};
  std::optional<CommError> error_;
};

QueuedCommunicator::QueuedCommunicator(std::unique_ptr<CollectiveBackend> backend,
                                       std::chrono::milliseconds timeout)
    : backend_(std::move(backend)), timeout_(timeout), thread_([this] { work(); }) {
  // thread_ is the last member, so that work() sees the others constructed.
}

QueuedCommunicator::~QueuedCommunicator() {
  bool busy = false;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    busy = !queue_.empty();
  }
  if (busy) abort("the communicator was destroyed while collectives were under way");
  wake_.notify_all();
  thread_.join();
}

WorkPtr QueuedCommunicator::start(Collective collective) {
  if (collective.deadline.count() <= 0) collective.deadline = timeout_;
  const std::lock_guard lock(mutex_);
  if (failure_ && !std::exchange(reported_, true)) throw CommError(*failure_);
  if (failure_) throw aborted_error();
  collective.sequence = sequence_++;
  if (recorder_) recorder_->queued(collective);
  auto item = std::make_shared<QueuedWork>(std::move(collective), waited_ns_);
  queue_.push_back(item);
  wake_.notify_one();
  return item;
}

std::string QueuedCommunicator::under_way() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() ? died_in_ : queue_.front()->collective.describe();
}

CommError QueuedCommunicator::aborted_error() const {
  CommError error(CommFailure::Aborted, failure_->culprits(),
                  "this communicator is dead; it failed before: {}", failure_->what());
  return error.set_fate(failure_->fate());
}

void QueuedCommunicator::set_recorder(std::shared_ptr<FlightRecorder> recorder) {
  const std::lock_guard lock(mutex_);
  recorder_ = std::move(recorder);
}

void QueuedCommunicator::abort(std::string_view reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    reported_ = true;  // the caller knows the reason
  }
  fail(CommError(CommFailure::Aborted, std::vector<int>{rank()},
                 "rank {} aborted communication: {}", rank(), reason));
}

void QueuedCommunicator::fail(const CommError& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = reason;
  }
  backend_->interrupt(reason);
  wake_.notify_all();
}

void QueuedCommunicator::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || failure_ || !queue_.empty(); });
    if (failure_ || queue_.empty()) break;
    const auto item = queue_.front();
    const auto recorder = recorder_;
    lock.unlock();
    std::optional<CommError> error;
    if (recorder) recorder->started(item->collective.sequence);
    try {
      fault_point(collective_name(item->collective.kind).data());
      backend_->run(item->collective);
    } catch (const CommError& failure) {
      error = failure;
    } catch (const std::exception& failure) {  // such as out of memory for staging
      error = CommError(CommFailure::Aborted, std::vector<int>{rank()}, "rank {}: {} failed: {}",
                        rank(), item->collective.describe(), failure.what());
    }
    if (recorder) recorder->ended(item->collective.sequence, !error);
    lock.lock();
    if (error && !failure_) failure_ = error;
    if (error) {
      died_in_ = item->collective.describe();
      reported_ = true;
    }
    // Dequeue first, because a waiter may destroy the communicator once the work is done.
    queue_.pop_front();
    lock.unlock();
    item->finish(error ? &*error : nullptr);
    lock.lock();
  }
  const std::optional<CommError> reason = failure_;
  auto left = std::exchange(queue_, {});
  const auto recorder = recorder_;
  bool reported = reported_ || left.empty();
  reported_ = reported_ || !left.empty();
  lock.unlock();
  backend_->close(reason ? &*reason : nullptr);
  for (const auto& item : left) {
    const CommError error =
        std::exchange(reported, true)
            ? CommError(CommFailure::Aborted, reason->culprits(), "{} did not run: {}",
                        item->collective.describe(), reason->what())
            : *reason;
    if (recorder) recorder->ended(item->collective.sequence, false);
    item->finish(&error);
  }
}

}  // namespace tessera::comm
