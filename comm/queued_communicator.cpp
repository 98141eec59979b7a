#include "comm/queued_communicator.h"

#include <utility>

#include "comm/flight_recorder.h"
#include "comm/single.h"
#include "comm/split.h"
#include "core/base/fault_point.h"

namespace tessera::comm {

std::string ConnectOptions::verdict_key() const {
  if (!verdict.empty()) return verdict;
  return communicator.ends_run ? kVerdict : name + "/failure";
}

AgreementOptions ConnectOptions::agreement(std::string_view step) const {
  AgreementOptions result{.name = fmt::format("{}/{}", name, step)};
  if (group() != nullptr) result.world_ranks = group()->ranks;
  result.verdict = verdict_key();
  return result;
}

void ConnectOptions::enter(const Membership& subgroup) {
  verdict = verdict_key();
  membership = subgroup;
  name = subgroup.group->key;
}

struct QueuedCommunicator::Caller {
  std::atomic<std::int64_t> waited_ns{0};
  std::atomic<bool> knows_failure{false};  // an error was thrown to it, or it aborted
};

namespace {

// Error of each call after the one that threw `reason`.
CommError aborted(const CommError& reason, std::string_view text) {
  CommError error(CommFailure::Aborted, reason.culprits(), "{}: {}", text, reason.what());
  return error.set_fate(reason.fate());
}

}  // namespace

class QueuedCommunicator::QueuedWork final : public Work {
 public:
  QueuedWork(Collective c, std::shared_ptr<FailureDomain> domain, std::shared_ptr<Caller> caller)
      : collective(std::move(c)), domain_(std::move(domain)), caller_(std::move(caller)) {}
  bool is_done() const override { return done_.load(std::memory_order_acquire); }
  void wait() override {
    std::unique_lock lock(mutex_);
    if (!is_done()) {
      const auto start = std::chrono::steady_clock::now();
      finished_.wait(lock, [&] { return is_done(); });
      const auto waited = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start);
      caller_->waited_ns += waited.count();
      domain_->waited_ns += waited.count();
    }
    if (!error_) return;
    if (caller_->knows_failure.exchange(true) && !ran_)
      throw aborted(*error_, collective.describe() + " did not run");
    throw CommError(*error_);
  }
  void finish(const CommError* error, bool ran) {
    const std::lock_guard lock(mutex_);
    if (error != nullptr) error_ = *error;
    ran_ = ran;
    done_.store(true, std::memory_order_release);
    finished_.notify_all();  // under the lock, because the waiter may destroy this at once
  }

  void record_start() const {
    if (recorder) recorder->started(entry);
  }
  void record_end(bool ok) const {
    if (recorder) recorder->ended(entry, ok);
  }

  const Collective collective;
  std::shared_ptr<FlightRecorder> recorder;  // may be null
  std::uint64_t entry = 0;                   // of the recorder

 private:
  const std::shared_ptr<FailureDomain> domain_;
  const std::shared_ptr<Caller> caller_;
  std::mutex mutex_;
  std::condition_variable finished_;
  std::atomic<bool> done_{false};
  std::optional<CommError> error_;
  bool ran_ = false;
};

QueuedCommunicator::QueuedCommunicator(std::unique_ptr<CollectiveBackend> backend,
                                       std::chrono::milliseconds timeout, Membership membership)
    : backend_(std::move(backend)),
      timeout_(timeout),
      membership_(std::move(membership)),
      caller_(std::make_shared<Caller>()),
      thread_([this] { work(); }) {
  // thread_ is the last member, so that work() sees the others constructed.
  membership_.domain->add(*this);
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
  membership_.domain->remove(*this);
}

WorkPtr QueuedCommunicator::start(Collective collective) {
  if (collective.deadline.count() <= 0) collective.deadline = timeout_;
  collective.group = membership_.group;
  const auto recorder = membership_.domain->recorder();
  const std::lock_guard lock(mutex_);
  if (failure_ && !caller_->knows_failure.exchange(true)) throw CommError(*failure_);
  if (failure_) throw aborted(*failure_, "this communicator is dead; it failed before");
  collective.sequence = sequence_++;
  auto item = std::make_shared<QueuedWork>(std::move(collective), membership_.domain, caller_);
  item->recorder = recorder;
  if (recorder) item->entry = recorder->queued(item->collective);
  queue_.push_back(item);
  wake_.notify_one();
  return item;
}

std::unique_ptr<Communicator> QueuedCommunicator::split(const std::vector<int>& members,
                                                        const std::string& kind) {
  const SplitOptions options{.group = membership_.group,
                             .key = backend_->key(),
                             .number = splits_++,
                             .connect_time = timeout_ + backend_->connect_timeout()};
  return split_communicator(*this, options, members, kind, [&](SubgroupPtr group, int rank) {
    const Membership subgroup{std::move(group), membership_.domain};
    if (subgroup.group->ranks.size() == 1) return make_single_communicator(subgroup);
    std::unique_ptr<Communicator> made = std::make_unique<QueuedCommunicator>(
        backend_->connect_subgroup(subgroup, rank), timeout_, subgroup);
    return made;
  });
}

std::int64_t QueuedCommunicator::waited_ns() const {
  return membership_.group ? caller_->waited_ns.load() : membership_.domain->waited_ns.load();
}

std::string QueuedCommunicator::under_way() const {
  return membership_.group ? under_way_alone() : membership_.domain->under_way();
}

std::string QueuedCommunicator::under_way_alone() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() ? died_in_ : queue_.front()->collective.describe();
}

void QueuedCommunicator::set_recorder(std::shared_ptr<FlightRecorder> recorder) {
  membership_.domain->set_recorder(std::move(recorder));
}

void QueuedCommunicator::abort(std::string_view reason) noexcept {
  caller_->knows_failure = true;
  fail(CommError(CommFailure::Aborted, std::vector<int>{own_world_rank()},
                 "rank {} aborted communication: {}", own_world_rank(), reason));
}

void QueuedCommunicator::fail(const CommError& reason) noexcept {
  membership_.domain->fail(reason);
}

void QueuedCommunicator::fail_alone(const CommError& reason) noexcept {
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
    lock.unlock();
    std::optional<CommError> error;
    item->record_start();
    try {
      fault_point(collective_name(item->collective.kind).data());
      backend_->run(item->collective);
    } catch (const CommError& failure) {
      error = failure;
    } catch (const std::exception& failure) {  // such as out of memory for staging
      error = CommError(CommFailure::Aborted, std::vector<int>{own_world_rank()},
                        "rank {}: {} failed: {}", own_world_rank(), item->collective.describe(),
                        failure.what());
    }
    item->record_end(!error);
    lock.lock();
    if (error && !failure_) failure_ = error;
    if (error) died_in_ = item->collective.describe();
    // Dequeue first, because a waiter may destroy the communicator once the work is done.
    queue_.pop_front();
    lock.unlock();
    if (error) membership_.domain->fail(*error);  // before the waiter can use another member
    item->finish(error ? &*error : nullptr, true);
    lock.lock();
  }
  const std::optional<CommError> reason = failure_;
  auto left = std::exchange(queue_, {});
  lock.unlock();
  backend_->close(reason ? &*reason : nullptr);
  for (const auto& item : left) {
    item->record_end(false);
    item->finish(&*reason, false);
  }
}

}  // namespace tessera::comm
