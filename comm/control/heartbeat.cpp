#include "comm/control/heartbeat.h"

#include <algorithm>

#include "comm/collective.h"
#include "comm/control/agreement.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Interval at which a wait for the verdict checks whether this rank leaves.
constexpr milliseconds kVerdictWait{250};
// Limit of the destructor's wait if options.silence is 0.
constexpr milliseconds kLeave{4000};
constexpr milliseconds kRetry{100};
constexpr int kRetries = 5;

}  // namespace

Heartbeat::Heartbeat(std::shared_ptr<Store> store, int rank, std::shared_ptr<RankStatus> status,
                     HeartbeatOptions options)
    : store_(std::move(store)),
      rank_(rank),
      status_(std::move(status)),
      options_(std::move(options)),
      thread_([this] { run(); }) {}

Heartbeat::~Heartbeat() {
  status_->leave();
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    wake_.notify_all();
    const milliseconds patience = options_.silence.count() > 0 ? options_.silence : kLeave;
    if (!wake_.wait_for(lock, patience, [this] { return ended_; })) store_->give_up();
  }
  thread_.join();
  try {
    store_->beat(rank_, status_->state());
  } catch (const std::exception&) {
    // The server is gone or the run has failed, so no heartbeat is expected.
  }
}

bool Heartbeat::sleep(milliseconds time) {
  std::unique_lock lock(mutex_);
  return wake_.wait_for(lock, time, [this] { return stop_; });
}

CommError Heartbeat::lost(std::string_view why) const {
  CommError error(
      CommFailure::PeerLost, options_.server.ranks,
      "the control channel is lost: {}, which serves it, did not answer for {} ({}); it "
      "ended or is stopped, or the network to it is cut",
      options_.server.name, format_seconds(options_.silence), why);
  return error.set_fate(kNoAnswer);
}

std::optional<CommError> Heartbeat::wait_for_verdict(milliseconds at_most) {
  const auto end = Clock::now() + at_most;
  do {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    if (auto verdict = find_verdict(*store_, std::clamp(left, milliseconds(0), kVerdictWait)))
      return verdict;
    const std::lock_guard lock(mutex_);
    if (stop_) return std::nullopt;
  } while (Clock::now() < end);
  return std::nullopt;
}

std::optional<CommError> Heartbeat::verdict(milliseconds at_most) {
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, at_most, [this] { return verdict_ || ended_; });
  return verdict_;
}

void Heartbeat::run() {
  if (const auto verdict = watch()) {
    {
      const std::lock_guard lock(mutex_);
      verdict_ = verdict;
    }
    wake_.notify_all();
    if (options_.on_verdict) options_.on_verdict(*verdict);
    if (is_lost_ && options_.on_lost) options_.on_lost();
    if (!sleep(options_.leave_within) && options_.on_stuck) options_.on_stuck(*verdict);
  }
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  wake_.notify_all();
}

std::optional<CommError> Heartbeat::watch() {
  auto answered = Clock::now();
  int failures = 0;
  for (;;) {
    try {
      store_->beat(rank_, status_->state());
      if (auto verdict = wait_for_verdict(options_.period)) return verdict;
      answered = Clock::now();
      failures = 0;
    } catch (const std::exception& error) {
      // The host of a dead process refuses connections at once, so retries end before `silence`.
      const bool is_silent =
          options_.silence.count() > 0 && Clock::now() - answered >= options_.silence;
      if (++failures >= kRetries || is_silent) {
        is_lost_ = true;
        store_->give_up();
        return lost(error.what());
      }
      if (sleep(kRetry)) return std::nullopt;
    }
    const std::lock_guard lock(mutex_);
    if (stop_) return std::nullopt;
  }
}

}  // namespace tessera::comm
