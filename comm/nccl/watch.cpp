// The prober and watchdog threads of NcclCore.
#include <algorithm>
#include <chrono>
#include <thread>

#include "comm/flight_recorder.h"
#include "comm/nccl/communicator.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using State = NcclStatus::State;

constexpr milliseconds kFinalizeTime{2000};

}  // namespace

std::optional<NcclSuspicion> NcclCore::look() {
  const auto during_oldest = [this](bool remote, std::string text) {
    const auto oldest = pending_.oldest();
    return NcclSuspicion{.collective = oldest ? oldest->collective : Collective{},
                         .remote = remote,
                         .text = std::move(text)};
  };
  try {
    if (const auto late = pending_.advance(Clock::now())) {
      return NcclSuspicion{.collective = late->collective, .late = true};
    }
    const std::unique_lock lock(nccl_, std::try_to_lock);
    if (!lock.owns_lock()) return std::nullopt;  // the caller is in NCCL and watches the status
    const NcclStatus status = driver_->status();
    if (status.state != State::Failed) return std::nullopt;
    return during_oldest(status.remote, status.text);
  } catch (const std::exception& error) {
    return during_oldest(false, error.what());
  }
}

void NcclCore::probe() {
  std::unique_lock lock(mutex_);
  for (;;) {
    // Polls more often during shutdown.
    const auto pause = stop_ ? std::min(options_.poll, milliseconds(1)) : options_.poll;
    changed_.wait_for(lock, pause,
                      [&, stopped = stop_] { return failure_ || (stop_ && !stopped); });
    if (failure_ || (stop_ && pending_.is_empty())) break;
    if (suspicion_) continue;  // the watchdog investigates it
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
  if (failed) pending_.record_failure();
  nccl_.lock();  // no other thread may be in NCCL; the watchdog limits the time
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
  } catch (const std::exception&) {  // the device is lost, so nothing is left to flush
  }
  driver_->abort();
}

void NcclCore::watch() {
  auto next_ask = Clock::now();
  std::unique_lock lock(mutex_);
  while (!failure_ && !is_closed_) {
    changed_.wait_for(lock, options_.poll, [this] { return failure_ || suspicion_ || is_closed_; });
    if (failure_ || is_closed_) break;
    const auto now = Clock::now();
    if (closing_since_ && now - *closing_since_ >= kFinalizeTime + options_.abort_time) return;
    auto suspicion = suspicion_;
    if (!suspicion && calling_ && now - calling_->since >= calling_->collective.deadline)
      suspicion = NcclSuspicion{.collective = calling_->collective, .late = true};
    // Limit of a blocked probe and of shutdown. Collectives not yet reached have no deadline.
    const auto limit = options_.communicator.timeout + options_.grace;
    const auto overdue = [&](const std::optional<Clock::time_point>& since) {
      return since && now - *since >= limit;
    };
    const bool is_silent = overdue(probing_since_) || (!closing_since_ && overdue(stopping_since_));
    std::optional<CommError> error;
    lock.unlock();
    if (suspicion) {
      error = inquiry_.investigate(*suspicion);
    } else if (is_silent) {
      error = CommError(CommFailure::Timeout, std::vector<int>{own_world_rank()},
                        "rank {}: its device has not answered for {}", own_world_rank(),
                        format_seconds(limit));
    } else if (now >= next_ask) {
      error = inquiry_.ask_peers();
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
  domain().fail(failure);
  inquiry_.publish(failure);
  lock.lock();
  const bool in_time = changed_.wait_for(lock, options_.abort_time, [this] {
    return is_closed_;
  }) && is_noticed_in_time(lock);
  lock.unlock();
  if (in_time || !options_.on_stuck) return;
  if (const auto last = domain().recorder()) last->end(failure);  // the caller may never record it
  options_.on_stuck(failure);
}

// The caller may notice the failure on another communicator of the family, which does not notify.
bool NcclCore::is_noticed_in_time(std::unique_lock<std::mutex>& lock) {
  const auto end = Clock::now() + options_.grace;
  while (!noticed_ && !domain().is_noticed) {
    const auto now = Clock::now();
    if (now >= end) return false;
    changed_.wait_until(lock, std::min(end, now + options_.poll));
  }
  return true;
}

NcclPosition NcclCore::position() const {
  NcclPosition result;
  result.called = called_;
  if (const auto oldest = pending_.oldest()) {
    result.unfinished = 1;
    result.has_started = oldest->has_started ? 1 : 0;
    result.oldest = Signature(oldest->collective);
  } else if (const std::lock_guard lock(mutex_); calling_) {
    result.unfinished = 1;
    result.has_started = 1;
    result.oldest = Signature(calling_->collective);
  }
  return result;
}

}  // namespace tessera::comm
