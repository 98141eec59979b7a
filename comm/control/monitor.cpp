#include "comm/control/monitor.h"

#include <algorithm>
#include <utility>

#include "comm/collective.h"
#include "comm/control/agreement.h"
#include "comm/control/tcp_store.h"
#include "comm/control/withheld_time.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kWatchTick{100};
constexpr std::chrono::seconds kWarnAgain{60};
// After a stop of this process, ranks that gave up close their connections within this time.
constexpr std::chrono::seconds kAftermath{3};
// For the ranks, a stop of this process may be longer than measured by up to this.
constexpr milliseconds kUnseen{500};
// Minimum number of steps in a window.
constexpr std::int64_t kFewSteps = 3;
// A rank below this compute time per step, in seconds, is never slow.
constexpr double kNoTime = 10e-3;

std::string describe(int rank, const RankState& state) {
  return fmt::format("rank {} ({})", rank, state.process);
}

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

void grant(std::map<int, Beat>& beats, Clock::duration withheld, Clock::time_point now) {
  for (auto& [rank, beat] : beats) {
    beat.at += std::min(withheld, now - beat.at);
    if (beat.broken) *beat.broken += std::min(withheld, now - *beat.broken);
  }
}

void BeatTable::beat(int rank, RankState state, std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  beats_[rank] = Beat{Clock::now(), connection, std::nullopt, std::move(state)};
}

void BeatTable::broken(int rank, std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  const auto found = beats_.find(rank);
  if (found != beats_.end() && found->second.connection == connection)
    found->second.broken = Clock::now();
}

void BeatTable::grant(Clock::duration withheld, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  comm::grant(beats_, withheld, now);
}

std::map<int, Beat> BeatTable::all() const {
  const std::lock_guard lock(mutex_);
  return beats_;
}

std::optional<CommError> judge_beats(const std::map<int, Beat>& beats, Clock::time_point now,
                                     const MonitorOptions& options) {
  std::vector<int> ended, silent;
  for (const auto& [rank, beat] : beats) {
    if (beat.state.leaving) continue;
    if (beat.broken) {
      if (now - *beat.broken >= options.broken) ended.push_back(rank);
    } else if (options.silence.count() > 0 && now - beat.at >= options.silence) {
      silent.push_back(rank);
    }
  }
  const std::vector<int>& culprits = ended.empty() ? silent : ended;
  if (culprits.empty()) return std::nullopt;
  std::string names, where;
  Clock::duration longest{};
  for (const int rank : culprits) {
    const Beat& beat = beats.at(rank);
    names += (names.empty() ? "" : ", ") + describe(rank, beat.state);
    where += (where.empty() ? "" : "; ") + beat.state.where();
    longest = std::max(longest, now - beat.at);
  }
  if (!ended.empty()) {
    CommError error(CommFailure::PeerLost, ended, "lost {}, which ended without notice during {}",
                    names, where);
    return error.set_fate("ended");
  }
  CommError error(CommFailure::Timeout, silent,
                  "no heartbeat of {} for {:.1f} s, last seen in {}; a process or its host is "
                  "stopped, or the network between them is cut",
                  names, seconds(longest), where);
  return error.set_fate("stopped");
}

void OwnStop::look(Clock::duration withheld, Clock::time_point now) {
  if (options_.silence.count() == 0 || withheld + kUnseen < options_.silence) return;
  ended_ = now;
  stopped_ = withheld;
}

CommError OwnStop::judge(const CommError& error, const std::map<int, Beat>& beats,
                         Clock::time_point now) const {
  const auto sent_beat_after_stop = [&](int rank) {
    const auto beat = beats.find(rank);
    return beat != beats.end() && beat->second.arrived > ended_;
  };
  const std::vector<int>& lost = error.culprits();
  const bool is_aftermath = stopped_.count() > 0 && now - ended_ < options_.broken + kAftermath;
  const bool is_ours = is_aftermath && error.failure() == CommFailure::PeerLost &&
                       std::none_of(lost.begin(), lost.end(), sent_beat_after_stop);
  if (!is_ours) return error;
  return CommError(CommFailure::PeerLost, options_.server.ranks,
                   "{} was stopped for {:.1f} s, and the ranks gave up waiting",
                   options_.server.name, seconds(stopped_))
      .set_fate(kNoAnswer);
}

std::vector<std::string> SlowRanks::look(const std::map<int, Beat>& beats, Clock::time_point now) {
  if (began_ != Clock::time_point{} && now - began_ < options_.slow_window) return {};
  std::map<int, double> own;  // compute time per step, in seconds
  for (const auto& [rank, beat] : beats) {
    const auto before = before_.find(rank);
    if (before == before_.end()) continue;
    const std::int64_t steps = beat.state.busy_steps - before->second.busy_steps;
    if (steps < kFewSteps) continue;
    own[rank] = static_cast<double>(beat.state.busy_us - before->second.busy_us) * 1e-6 /
                static_cast<double>(steps);
  }
  began_ = now;
  before_.clear();
  for (const auto& [rank, beat] : beats) before_[rank] = beat.state;
  if (own.size() < 2 || own.size() != beats.size()) return {};

  std::vector<double> sorted;
  for (const auto& [rank, time] : own) sorted.push_back(time);
  std::sort(sorted.begin(), sorted.end());
  const double median = sorted[(sorted.size() - 1) / 2];
  std::vector<std::string> notes;
  for (const auto& [rank, time] : own) {
    if (time < options_.slow * median || time < kNoTime) continue;
    const auto warned_at = warned_at_.find(rank);
    if (warned_at != warned_at_.end() && now - warned_at->second < kWarnAgain) continue;
    warned_at_[rank] = now;
    notes.push_back(fmt::format(
        "rank {} ({}) is slow: it computes {:.3g} s a step, {:.1f} times the median of {:.3g} s, "
        "and all ranks wait for it",
        rank, beats.at(rank).state.process, time, median > 0 ? time / median : 0.0, median));
  }
  return notes;
}

Monitor::Monitor(TcpStoreServer& server, const MonitorOptions& options,
                 std::function<void(const CommError&)> on_verdict,
                 std::function<void(const std::string&)> on_note)
    : server_(server),
      options_(options),
      on_verdict_(std::move(on_verdict)),
      on_note_(std::move(on_note)),
      withheld_(kWatchTick),
      thread_([this] { watch(); }) {}

Monitor::~Monitor() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Monitor::look(Clock::time_point now) {
  const auto withheld = withheld_.look(now);
  own_stop_.look(withheld, now);
  server_.beats().grant(withheld, now);
}

CommError Monitor::judge(const CommError& error) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  look(now);
  return own_stop_.judge(error, server_.beats().all(), now);
}

void Monitor::watch() {
  SlowRanks slow(options_);
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kWatchTick, [this] { return stop_; })) {
    const auto now = Clock::now();
    look(now);
    const auto beats = server_.beats().all();
    const OwnStop own_stop = own_stop_;
    lock.unlock();
    if (on_note_) {
      for (const std::string& note : slow.look(beats, now)) on_note_(note);
    }
    if (const auto error = judge_beats(beats, now, options_)) {
      const CommError verdict = publish_verdict(server_, own_stop.judge(*error, beats, now));
      if (on_verdict_) on_verdict_(verdict);
      return;
    }
    lock.lock();
  }
}

}  // namespace tessera::comm
