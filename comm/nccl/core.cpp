#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <future>

#include "comm/control/agreement.h"
#include "comm/control/socket.h"
#include "comm/flight_recorder.h"
#include "comm/nccl/communicator.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using State = NcclStatus::State;

// One collective that stands for a launch in messages and signatures.
Collective summary(std::span<const std::shared_ptr<NcclItem>> items) {
  Collective all = items.front()->collective;
  for (const auto& item : items.subspan(1)) {
    all.label += " + " + item->collective.label;
    all.count += item->collective.count;
    all.deadline += item->collective.deadline;
  }
  return all;
}

constexpr std::string_view kConnected = "connected";

// Time for which a launch is polled without sleeping: the shortest sleep takes 60 us, as Linux adds
// its timer slack of 50 us, and the host queues nothing meanwhile.
constexpr std::chrono::microseconds kSpin{50};

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
      comparison_(store_, options_.name + "/calls", rank, world_size, options_.membership.group),
      inquiry_(store_, rank, world_size, options_, comparison_, [this] { return position(); }) {}

void NcclCore::connect() {
  const auto end = Clock::now() + options_.connect_timeout;
  // Call NCCL's init only after all ranks have arrived, because it has no deadline.
  exchange(*store_, options_.agreement("start"), rank_, world_size_, "here", time_until(end));
  const std::optional<CommError> error = initialize(end);
  constexpr milliseconds kSkew{3000};
  std::vector<std::string> outcomes;
  try {
    if (error) set_or_get(*store_, inquiry_.key("not started"), std::to_string(rank_));
    outcomes = exchange(*store_, options_.agreement("connection"), rank_, world_size_,
                        error ? encode_error(*error) : kConnected, time_until(end) + kSkew);
  } catch (const CommError&) {
    abort_in_time();
    throw;
  }
  // Prefer a rank's own failure to the error of a rank that gave up because of another rank.
  const auto weight = [](const CommError& e) {
    if (!e.culprits().empty()) return 2;
    return e.failure() == CommFailure::Timeout ? 1 : 0;
  };
  std::optional<CommError> verdict;
  for (const std::string& outcome : outcomes) {
    if (outcome == kConnected) continue;
    const CommError theirs = decode_error(outcome);
    if (!verdict || weight(theirs) > weight(*verdict)) verdict = theirs;
  }
  if (!verdict) return;
  abort_in_time();
  throw CommError(*verdict);
}

std::optional<CommError> NcclCore::initialize(Clock::time_point end) {
  const auto refused = [this](std::string_view why) {
    const int self[] = {rank_};
    return CommError(CommFailure::Aborted, std::vector<int>{own_world_rank()},
                     "NCCL {} does not start on {}: {}", driver_->version(), inquiry_.name(self),
                     why);
  };
  try {
    if (rank_ == 0) store_->set(inquiry_.key("id"), driver_->make_unique_id());
    const std::string id = store_->get(inquiry_.key("id"), time_until(end));
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
        if (store_->has(inquiry_.key("not started"))) {
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

// Aborts NCCL on a separate thread, which is abandoned if it blocks.
void NcclCore::abort_in_time() {
  auto done = std::make_shared<std::promise<void>>();
  auto future = done->get_future();
  std::thread([self = shared_from_this(), done] {
    self->driver_->abort();
    done->set_value();
  }).detach();
  future.wait_for(options_.abort_time);
}

void NcclCore::start_threads() {
  prober_ = std::thread([self = shared_from_this()] { self->probe(); });
  watchdog_ = std::thread([self = shared_from_this()] { self->watch(); });
}

void NcclCore::run(std::span<const Call> group) {
  // A member, because copies may still use its buffers after a failure below.
  launching_ = std::make_shared<NcclLaunch>();
  NcclLaunch& launch = *launching_;
  std::vector<Collective> calls;
  for (const Call& call : group) {
    launch.items.push_back(call.item);
    if (call.call.count > 0) calls.push_back(call.call);
  }
  launch.collective = summary(launch.items);
  launch.collective.sequence = called_++;
  for (const auto& item : launch.items) item->collective.sequence = launch.collective.sequence;
  launch.recorder = domain().recorder();
  if (launch.recorder) launch.entry = launch.recorder->queued(launch.collective);
  const auto record_failure = [&launch] {
    if (launch.recorder) launch.recorder->ended(launch.entry, false);
  };
  const auto each_staged = [&launch](auto&& copy) {
    for (const auto& item : launch.items) {
      for (const NcclItem::Staged& staged : item->staged) {
        if (staged.bytes > 0) copy(staged);
      }
    }
  };
  try {
    set_calling(Calling{launch.collective, Clock::now()});
    compare(launch);
    set_calling(std::nullopt);
    driver_->wait_for_compute();
    each_staged([this](const NcclItem::Staged& staged) {
      std::memcpy(staged.pinned->data(), staged.user, staged.bytes);
      driver_->copy_to_device(staged.device->data(), staged.pinned->data(), staged.bytes);
    });
    launch.start = driver_->record();
    if (!calls.empty()) {
      set_calling(Calling{launch.collective, Clock::now()});
      enqueue(calls, launch.collective);
      set_calling(std::nullopt);
    }
    each_staged([this](const NcclItem::Staged& staged) {
      if (!staged.is_result) return;
      driver_->copy_to_host(staged.pinned->data(), staged.device->data(), staged.bytes);
    });
    launch.done = driver_->record();
    for (const auto& item : launch.items) item->done = launch.done;
  } catch (const CommError&) {
    record_failure();
    throw;
  } catch (const std::exception& error) {
    record_failure();
    report({.collective = launch.collective, .text = error.what()});
  }
  pending_.push(std::move(launching_));
}

// Returns once all ranks are known to make this launch.
void NcclCore::compare(const NcclLaunch& launch) {
  std::vector<Collective> parts;
  for (const auto& item : launch.items) parts.push_back(item->collective);
  // The watchdog enforces the deadline.
  const auto wrong = comparison_.check(launch.collective, parts, [this] {
    const std::lock_guard lock(mutex_);
    return failure_.has_value();
  });
  if (wrong) report(*wrong);
  check_alive();
}

std::shared_ptr<NcclCore> NcclCore::connect_subgroup(const Membership& subgroup, int rank) const {
  NcclOptions options = options_;
  options.enter(subgroup);
  const auto core = std::make_shared<NcclCore>(
      driver_->open_again(), store_, rank, static_cast<int>(subgroup.group->ranks.size()), options);
  core->connect();
  return core;
}

void NcclCore::set_calling(std::optional<Calling> calling) {
  const std::lock_guard lock(mutex_);
  calling_ = std::move(calling);
}

// Enqueues `calls` and waits until they are on the stream: NCCL may enqueue in the background, and
// allows no other call meanwhile. Errors name `collective`.
void NcclCore::enqueue(std::span<const Collective> calls, const Collective& collective) {
  const auto end = Clock::now() + collective.deadline;
  const auto under_lock = [&](auto&& ask) {
    const std::unique_lock lock(nccl_, end);
    if (!lock.owns_lock()) report({.collective = collective, .late = true});
    return ask();
  };
  NcclStatus status = under_lock([&] {
    check_alive();  // no call may follow an abort
    return driver_->run(calls);
  });
  const auto end_of_spin = Clock::now() + kSpin;
  for (Pause pause; status.state == State::InProgress;) {
    const auto now = Clock::now();
    if (now >= end) report({.collective = collective, .late = true});
    if (now < end_of_spin) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause.next());
    }
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
  const auto limit = options_.answer_time + 2 * kNcclVerdictTime;
  if (!changed_.wait_for(lock, limit, [this] { return failure_.has_value(); })) {
    // A late collective may be a peer's fault; an error here is this rank's own.
    failure_ = suspicion.late
                   ? CommError(CommFailure::Timeout, {},
                               "{} is late, and the ranks could not find the cause",
                               suspicion.collective.describe())
                   : CommError(CommFailure::Aborted, std::vector<int>{own_world_rank()},
                               "{} failed: {}", suspicion.collective.describe(), suspicion.text);
    changed_.notify_all();
  }
  lock.unlock();
  throw_failure();
}

void NcclCore::wait(NcclItem& item) {
  check_alive();
  require<InternalError>(item.done != nullptr, "{} was waited for before its group ended",
                         item.collective.describe());
  item.waited = true;
  if (!item.host_waits) {
    check_alive();
    driver_->hold_back_compute(*item.done);
    return;
  }
  for (Pause pause;;) {
    check_alive();  // the prober enforces the deadline
    if (item.done->is_done()) break;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, pause.next(), [this] { return failure_.has_value(); });
  }
  check_alive();  // an abort also completes events
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
    return item.done && item.done->is_done();
  } catch (const std::exception&) {  // a device error, which wait() reports
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
  domain().is_noticed = true;
  if (!std::exchange(noticed_, true)) throw CommError(*failure_);
  throw CommError(CommFailure::Aborted, failure_->culprits(),
                  "this communicator is dead; it failed before: {}", failure_->what());
}

void NcclCore::fail_alone(const CommError& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  failure_ = error;
  changed_.notify_all();
}

void NcclCore::shut_down() noexcept {
  if (!pending_.is_empty() && !pending_.all_waited()) {
    domain().fail(CommError(CommFailure::Aborted, std::vector<int>{own_world_rank()},
                            "rank {} aborted communication: the communicator was destroyed while "
                            "collectives were under way",
                            own_world_rank()));
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
    prober_.detach();  // NCCL blocks; the thread owns a reference to this
  }
}

}  // namespace tessera::comm
