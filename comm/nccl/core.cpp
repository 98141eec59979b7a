#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <future>

#include "comm/control/agreement.h"
#include "comm/nccl/communicator.h"

namespace tessera::comm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using State = NcclStatus::State;

// Between two looks at something that is done soon: short at first, so as not to lose time.
class Pause {
 public:
  microseconds next() { return std::exchange(pause_, std::min(2 * pause_, microseconds(1000))); }

 private:
  microseconds pause_{10};
};

milliseconds left_until(NcclCore::Clock::time_point end) {
  return std::max(milliseconds(0),
                  std::chrono::duration_cast<milliseconds>(end - NcclCore::Clock::now()));
}

constexpr milliseconds kVerdictTime{5000};
constexpr milliseconds kFinalizeTime{2000};
constexpr std::string_view kConnected = "connected";

}  // namespace

void leave_process(const CommError& error) {
  const std::string text = fmt::format("tessera: error: {}\n", error.what());
  [[maybe_unused]] const auto n = ::write(STDERR_FILENO, text.data(), text.size());
  constexpr int kExitCode = 4;
  ::_exit(kExitCode);
}

NcclCore::NcclCore(std::unique_ptr<NcclDriver> driver, std::shared_ptr<Store> store, int rank,
                   int world_size, NcclOptions options)
    : options_(std::move(options)),
      rank_(rank),
      world_size_(world_size),
      store_(std::move(store)),
      driver_(std::move(driver)),
      report_(store_, options_.name + "/verdict", world_size, options_.processes) {}

std::string NcclCore::key(std::string_view what) const {
  return fmt::format("{}/{}", options_.name, what);
}

// --- connecting ---

void NcclCore::connect() {
  const auto end = Clock::now() + options_.connect_timeout;
  // NCCL's own start has no deadline, so it begins only when all are here.
  exchange(*store_, key("start"), rank_, world_size_, "here", left_until(end));
  const std::optional<CommError> error = initialize(end);
  constexpr milliseconds kSkew{3000};
  std::vector<std::string> outcomes;
  try {
    if (error) set_or_get(*store_, key("not started"), std::to_string(rank_));
    outcomes = exchange(*store_, key("connection"), rank_, world_size_,
                        error ? encode_error(*error) : kConnected, left_until(end) + kSkew);
  } catch (const CommError&) {
    abort_in_time();
    throw;
  }
  // Of several, one that failed by itself, not one that gave up since another had failed.
  std::optional<CommError> verdict;
  for (const std::string& outcome : outcomes) {
    if (outcome == kConnected) continue;
    const CommError theirs = decode_error(outcome);
    if (!verdict || (verdict->culprits().empty() && !theirs.culprits().empty())) verdict = theirs;
  }
  if (!verdict) return;
  abort_in_time();
  throw CommError(*verdict);
}

std::optional<CommError> NcclCore::initialize(Clock::time_point end) {
  const auto refused = [this](std::string_view why) {
    const int self[] = {rank_};
    return CommError(CommFailure::Aborted, std::vector<int>{rank_},
                     "NCCL {} does not start on {}: {}", driver_->version(), report_.name(self),
                     why);
  };
  try {
    if (rank_ == 0) store_->set(key("id"), driver_->make_unique_id());
    const std::string id = store_->get(key("id"), left_until(end));
    NcclStatus status = driver_->init(id, rank_, world_size_);
    auto next_look = Clock::now();
    for (Pause pause; status.state == State::InProgress; status = driver_->status()) {
      const auto now = Clock::now();
      if (now >= end) {
        return CommError(CommFailure::Timeout, {},
                         "NCCL {} did not connect {} ranks within {}, though all of them called "
                         "it; NCCL_DEBUG=INFO says more",
                         driver_->version(), world_size_, format_seconds(options_.connect_timeout));
      }
      if (now >= next_look) {
        if (store_->has(key("not started"))) {
          return CommError(CommFailure::Aborted, {}, "NCCL does not start on another rank");
        }
        next_look = now + options_.store_poll;
      }
      std::this_thread::sleep_for(pause.next());
    }
    if (status.state == State::Failed) return refused(status.text);
  } catch (const CommError& error) {
    return error;
  } catch (const std::exception& error) {
    return refused(error.what());
  }
  return std::nullopt;
}

// On a thread of its own: it may block, and then it is left behind.
void NcclCore::abort_in_time() {
  auto done = std::make_shared<std::promise<void>>();
  auto future = done->get_future();
  std::thread([self = shared_from_this(), done] {
    self->driver_->abort();
    done->set_value();
  }).detach();
  future.wait_for(options_.abort_time);
}

// --- the caller's thread ---

void NcclCore::start_threads() {
  prober_ = std::thread([self = shared_from_this()] { self->probe(); });
  watchdog_ = std::thread([self = shared_from_this()] { self->watch(); });
}

void NcclCore::run(const std::shared_ptr<NcclItem>& item, const Collective& call) {
  // Should it fail half-way, copies may still be under way.
  launching_ = item;
  try {
    driver_->wait_for_compute();
    for (const NcclItem::Staged& staged : item->staged) {
      if (staged.bytes == 0) continue;
      std::memcpy(staged.pinned->data(), staged.user, staged.bytes);
      driver_->copy_to_device(staged.device->data(), staged.pinned->data(), staged.bytes);
    }
    item->start = driver_->record();
    if (call.count > 0) {
      set_launch(Launch{item->collective, Clock::now()});
      enqueue(call, item->collective);
      set_launch(std::nullopt);
    }
    for (const NcclItem::Staged& staged : item->staged) {
      if (!staged.is_result || staged.bytes == 0) continue;
      driver_->copy_to_host(staged.pinned->data(), staged.device->data(), staged.bytes);
    }
    item->done = driver_->record();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    report({.collective = item->collective, .text = error.what()});
  }
  pending_.push(std::move(launching_));
}

void NcclCore::set_launch(std::optional<Launch> launch) {
  const std::lock_guard lock(mutex_);
  launch_ = std::move(launch);
}

// Returns when the collective is on the stream: NCCL may do that in the background, and then
// nothing may follow it before.
void NcclCore::enqueue(const Collective& call, const Collective& collective) {
  const auto end = Clock::now() + collective.deadline;
  const auto under_lock = [&](auto&& ask) {
    const std::unique_lock lock(nccl_, end);
    if (!lock.owns_lock()) report({.collective = collective, .late = true});
    return ask();
  };
  NcclStatus status = under_lock([&] {
    check_alive();  // before an abort, or not at all
    return driver_->run(call);
  });
  for (Pause pause; status.state == State::InProgress;) {
    if (Clock::now() >= end) report({.collective = collective, .late = true});
    std::this_thread::sleep_for(pause.next());
    status = under_lock([&] {
      check_alive();
      return driver_->status();
    });
  }
  if (status.state == State::Failed) {
    report({.collective = collective, .remote = status.remote, .text = status.text});
  }
}

void NcclCore::report(const NcclSuspicion& suspicion) {
  std::unique_lock lock(mutex_);
  if (!suspicion_) suspicion_ = suspicion;
  changed_.notify_all();
  const auto limit = options_.answer_time + 2 * kVerdictTime;
  if (!changed_.wait_for(lock, limit, [this] { return failure_.has_value(); })) {
    // Who is late may be a peer; a failure of this rank's own is its own.
    failure_ =
        suspicion.late
            ? CommError(CommFailure::Timeout, {}, "{} is late, and the ranks could not agree why",
                        suspicion.collective.describe())
            : CommError(CommFailure::Aborted, std::vector<int>{rank_}, "{} failed: {}",
                        suspicion.collective.describe(), suspicion.text);
    changed_.notify_all();
  }
  lock.unlock();
  throw_failure();
}

void NcclCore::wait(NcclItem& item) {
  item.waited = true;
  if (!item.host_waits) {
    check_alive();
    driver_->hold_back_compute(*item.done);
    return;
  }
  for (Pause pause;;) {
    check_alive();  // the prober sees to the deadline
    if (item.done->is_done()) break;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, pause.next(), [this] { return failure_.has_value(); });
  }
  check_alive();  // an abort, too, ends what is under way
  for (NcclItem::Staged& staged : item.staged) {
    if (staged.is_result && staged.bytes > 0) {
      std::memcpy(staged.user, staged.pinned->data(), staged.bytes);
    }
  }
}

bool NcclCore::is_done(const NcclItem& item) const noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return is_closed_;
  }
  try {
    return item.done->is_done();
  } catch (const std::exception&) {  // of the device: wait() will say so
    return true;
  }
}

void NcclCore::check_alive() {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) return;
  }
  throw_failure();
}

void NcclCore::throw_failure() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
  if (!std::exchange(noticed_, true)) throw CommError(*failure_);
  throw CommError(CommFailure::Aborted, failure_->culprits(),
                  "this communicator is dead; it failed before: {}", failure_->what());
}

void NcclCore::fail(const CommError& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  failure_ = error;
  changed_.notify_all();
}

void NcclCore::shut_down() noexcept {
  if (!pending_.is_empty() && !pending_.all_waited()) {
    fail(CommError(CommFailure::Aborted, std::vector<int>{rank_},
                   "rank {} aborted communication: the communicator was destroyed while "
                   "collectives were under way",
                   rank_));
  }
  std::unique_lock lock(mutex_);
  noticed_ = true;
  stop_ = true;
  stopping_since_ = Clock::now();
  changed_.notify_all();
  lock.unlock();
  watchdog_.join();
  lock.lock();
  const bool closed = is_closed_;
  lock.unlock();
  if (closed) {
    prober_.join();
  } else {
    prober_.detach();  // NCCL does not let go; the thread shares what it uses
  }
}

// --- the prober ---

std::optional<NcclSuspicion> NcclCore::look() {
  try {
    if (const auto late = pending_.advance(Clock::now())) {
      return NcclSuspicion{.collective = late->collective, .late = true};
    }
    const std::unique_lock lock(nccl_, std::try_to_lock);
    if (!lock.owns_lock()) return std::nullopt;  // the caller is in NCCL, and watches the status
    const NcclStatus status = driver_->status();
    if (status.state != State::Failed) return std::nullopt;
    const auto item = pending_.oldest();
    return NcclSuspicion{.collective = item ? item->collective : Collective{},
                         .remote = status.remote,
                         .text = status.text};
  } catch (const std::exception& error) {
    const auto item = pending_.oldest();
    return NcclSuspicion{.collective = item ? item->collective : Collective{},
                         .text = error.what()};
  }
}

void NcclCore::probe() {
  std::unique_lock lock(mutex_);
  for (;;) {
    // At the end, what is still under way is looked at more often.
    const auto pause = stop_ ? std::min(options_.poll, milliseconds(1)) : options_.poll;
    changed_.wait_for(lock, pause,
                      [&, stopped = stop_] { return failure_ || (stop_ && !stopped); });
    if (failure_ || (stop_ && pending_.is_empty())) break;
    if (suspicion_) continue;  // the watchdog is at work on it
    probing_since_ = Clock::now();
    lock.unlock();
    auto found = look();
    lock.lock();
    probing_since_.reset();
    if (found && !suspicion_) {
      suspicion_ = std::move(found);
      changed_.notify_all();
    }
  }
  const bool failed = failure_.has_value();
  closing_since_ = Clock::now();
  lock.unlock();
  nccl_.lock();  // no other thread may be in NCCL; the watchdog sees to the time
  if (failed) {
    driver_->abort();
  } else {
    close_driver();
  }
  nccl_.unlock();
  lock.lock();
  is_closed_ = true;
  changed_.notify_all();
}

void NcclCore::close_driver() {
  const auto end = Clock::now() + kFinalizeTime;
  try {
    NcclStatus status = driver_->finalize();
    for (Pause pause; status.state == State::InProgress && Clock::now() < end;) {
      std::this_thread::sleep_for(pause.next());
      status = driver_->status();
    }
    if (status.state == State::Ready) return driver_->destroy();
  } catch (const std::exception&) {  // the device is lost: nothing is left to flush
  }
  driver_->abort();
}

// --- the watchdog ---

void NcclCore::watch() {
  auto next_ask = Clock::now();
  std::unique_lock lock(mutex_);
  while (!failure_ && !is_closed_) {
    changed_.wait_for(lock, options_.poll, [this] { return failure_ || suspicion_ || is_closed_; });
    if (failure_ || is_closed_) break;
    const auto now = Clock::now();
    if (closing_since_ && now - *closing_since_ >= kFinalizeTime + options_.abort_time) return;
    auto suspicion = suspicion_;
    if (!suspicion && launch_ && now - launch_->since >= launch_->collective.deadline)
      suspicion = NcclSuspicion{.collective = launch_->collective, .late = true};
    // What has not started has no deadline of its own.
    const auto limit = options_.communicator.timeout + options_.grace;
    const auto overdue = [&](const std::optional<Clock::time_point>& since) {
      return since && now - *since >= limit;
    };
    const bool is_silent = overdue(probing_since_) || (!closing_since_ && overdue(stopping_since_));
    std::optional<CommError> error;
    lock.unlock();
    if (suspicion) {
      error = investigate(*suspicion);
    } else if (is_silent) {
      error =
          CommError(CommFailure::Timeout, std::vector<int>{rank_},
                    "rank {}: its device has not answered for {}", rank_, format_seconds(limit));
    } else if (now >= next_ask) {
      error = ask_peers();
      next_ask = Clock::now() + options_.store_poll;
    }
    lock.lock();
    if (error && !failure_) {
      failure_ = error;
      changed_.notify_all();
    }
  }
  if (!failure_) return;
  const CommError failure = *failure_;
  lock.unlock();
  publish(failure);
  lock.lock();
  const bool in_time = changed_.wait_for(lock, options_.abort_time, [this] {
    return is_closed_;
  }) && changed_.wait_for(lock, options_.grace, [this] { return noticed_; });
  lock.unlock();
  if (!in_time && options_.on_stuck) options_.on_stuck(failure);
}

// Whether another rank has found something.
std::optional<CommError> NcclCore::ask_peers() {
  if (store_is_lost_) return std::nullopt;
  try {
    if (!store_->has(key("alarm"))) return std::nullopt;
    publish_position();
    return await_verdict(store_->get(key("alarm"), kVerdictTime));
  } catch (const std::exception&) {  // who serves it went first; that alone is no failure
    store_is_lost_ = true;
    return std::nullopt;
  }
}

CommError NcclCore::await_verdict(const std::string& who) {
  const CommError none(CommFailure::Aborted, {},
                       "rank {} found communication broken, and left no verdict", who);
  const auto end = Clock::now() + options_.answer_time + kVerdictTime;
  while (!store_->has(key("verdict")) && Clock::now() < end) {
    std::this_thread::sleep_for(std::min(options_.poll, milliseconds(20)));
  }
  return report_.verdict(none);
}

CommError NcclCore::investigate(const NcclSuspicion& suspicion) {
  std::vector<std::optional<NcclPosition>> positions(static_cast<std::size_t>(world_size_));
  try {
    set_or_get(*store_, key("alarm"), std::to_string(rank_));
    publish_position();
    const auto end = Clock::now() + options_.answer_time;
    for (bool all = false; !all && Clock::now() < end && !store_->has(key("verdict"));) {
      all = true;
      for (int r = 0; r < world_size_; ++r) {
        auto& position = positions[static_cast<std::size_t>(r)];
        const std::string at = key(fmt::format("position/{}", r));
        if (!position && store_->has(at)) {
          position = NcclPosition::decode(store_->get(at, kVerdictTime));
        }
        all = all && position;
      }
      if (!all) std::this_thread::sleep_for(std::min(options_.poll, milliseconds(20)));
    }
  } catch (const std::exception&) {
    store_is_lost_ = true;
    return CommError(suspicion.late ? CommFailure::Timeout : CommFailure::Aborted, {},
                     "{}: rank {}: {}; and the store is lost, so the ranks can't tell each other "
                     "where they are",
                     suspicion.collective.describe(), rank_,
                     suspicion.late
                         ? "not done within " + format_seconds(suspicion.collective.deadline)
                         : suspicion.text);
  }
  return report_.verdict(judge(suspicion, rank_, positions, report_, options_.answer_time));
}

void NcclCore::publish_position() {
  NcclPosition position;
  position.called = called_;
  if (const auto item = pending_.oldest()) {
    position.unfinished = 1;
    position.has_started = item->has_started ? 1 : 0;
    position.oldest = Signature(item->collective);
  } else if (const std::lock_guard lock(mutex_); launch_) {
    position.unfinished = 1;
    position.has_started = 1;
    position.oldest = Signature(launch_->collective);
  }
  set_or_get(*store_, key(fmt::format("position/{}", rank_)), position.encode());
}

// Peers that ask learn of it.
void NcclCore::publish(const CommError& error) {
  if (store_is_lost_) return;
  try {
    report_.verdict(error);
    set_or_get(*store_, key("alarm"), std::to_string(rank_));
  } catch (const std::exception&) {
    store_is_lost_ = true;
  }
}

}  // namespace tessera::comm
