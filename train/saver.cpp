#include "train/saver.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/base/clock.h"

namespace tessera::train {
namespace {

using std::chrono::milliseconds;
using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

// Added to the timeout, so that the writer reports its own timeout first.
constexpr milliseconds kReportMargin{1000};
constexpr milliseconds kSlice{50};
constexpr double kReportedWait = 1e-3;  // seconds; shorter waits are not reported

// Throws before a checkpoint with NaN can replace a good one.
void require_finite(const io::SaveRequest& request, io::SaveCoordinator& coordinator) {
  const auto phase = fmt::format("finite at step {}", request.step);
  const auto answers = coordinator.exchange(phase, is_finite(request) ? "yes" : "no");
  const auto bad = std::find(answers.begin(), answers.end(), "no");
  require<NonFiniteLoss>(bad == answers.end(),
                         "step {}: after its update, weights or optimizer state of rank {} are not "
                         "finite; they were not saved. Lower optim.lr or resume from an earlier "
                         "checkpoint",
                         request.step - 1, bad - answers.begin());
}

// @return a warning if old checkpoints could not be removed; else empty
// @throws IoError, equal on all ranks, if the new checkpoint is damaged when read back
std::string prune(const io::SaveRequest& request, const io::Retention& retention,
                  io::SaveCoordinator& coordinator) {
  try {
    io::prune_checkpoints(request, retention, coordinator);
  } catch (const std::exception& error) {
    if (retention.damaged->contains(request.step)) throw;
    // No warning in a hurry, because the next run removes them.
    const bool hurried = request.hurry && *request.hurry;
    if (request.rank == 0 && !hurried)
      return fmt::format("warning: old checkpoints were not removed: {}", error.what());
  }
  return {};
}

std::string message_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
  return {};
}

/// A rank's state at the end of the run, sent to the other ranks.
struct FinalReport {
  std::int64_t saved = -1;
  std::int64_t in_flight = -1;  ///< step of a save that hangs
  bool committed = false;       ///< the save hangs after its commit
  std::string failure = {}, fatal = {};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FinalReport, saved, in_flight, committed, failure, fatal)

// Error text if a save hangs at the end of the run.
std::string hanging_save(const FinalReport& words, std::int64_t step, milliseconds timeout,
                         std::string_view where) {
  std::string said = fmt::format("was not saved: the save of step {}", words.in_flight);
  if (words.in_flight == step) said = "may not be saved: its save";
  if (words.in_flight == step && words.committed)
    said = "is committed, but reading it back and removing old ones";
  return fmt::format(
      "step {} {} has hung for {} on {}; check that rank's disk, or raise checkpoint.timeout", step,
      said, format_duration(timeout), where);
}

}  // namespace

Saver::Saver(SaverOptions options, std::shared_ptr<comm::Store> store,
             io::SaveCoordinator& coordinator, comm::ShardedModel& sharded)
    : options_(std::move(options)),
      store_(std::move(store)),
      coordinator_(coordinator),
      sharded_(sharded),
      saved_step_(options_.saved_step) {
  options_.retention.damaged = std::make_shared<std::set<std::int64_t>>();
  if (!options_.in_background) return;
  const std::size_t bytes = io::AsyncSaver::staging_bytes(
      make_save_request(sharded_, options_.with_optimizer, options_.trainable_only));
  async_ = std::make_unique<io::AsyncSaver>(sharded_.state_context(), bytes,
                                            options_.timeout + kReportMargin);
  sharded_.before_update(this, [this] { wait_copied(); });
}

Saver::~Saver() { sharded_.before_update(this, {}); }

io::SaveRequest Saver::complete(io::SaveRequest request, const TrainerState& state) const {
  request.checkpoints_dir = options_.checkpoints_dir;
  request.step = state.step;
  request.rank = options_.rank;
  request.world_size = options_.world_size;
  request.run_id = options_.run_id;
  request.model_config = options_.model;
  if (options_.with_trainer) request.trainer_json = format_trainer_state(state);
  request.pulse = pulse_;
  request.hurry = hurry_;
  // A save that hangs may outlive this object.
  request.at_point = [at_point = options_.at_point, at_commit = options_.at_commit,
                      step = state.step](std::string_view point) {
    if (at_point) at_point(point);
    if (at_commit && point == "committed") at_commit(step);
  };
  return request;
}

bool Saver::agree(std::int64_t step) {
  const auto failed = [this] { return !failure_.empty() || fatal_ != nullptr; };
  if (!pending_) return failed();  // equal on all ranks
  const bool busy = async_->busy();
  poll();
  const auto answers =
      coordinator_.exchange(fmt::format("saves at step {}", step), failed() ? "failed"
                                                                   : busy   ? "busy"
                                                                            : "");
  const auto any = [&](std::string_view what) { return std::ranges::count(answers, what) > 0; };
  pending_ = any("busy");
  return any("failed");
}

std::optional<std::int64_t> Saver::in_flight() const {
  return async_ && async_->busy() ? std::optional(step_) : std::nullopt;
}

void Saver::save(const TrainerState& state) {
  const auto begin = Clock::now();
  if (!async_) {
    try {
      save_here(state);
    } catch (const IoError& error) {  // thrown on all ranks
      failed(state.step, error.what());
    }
    return;
  }
  if (pending_ && !wait_for_former(state.step)) return;
  poll();
  start(state, begin);
}

void Saver::start(const TrainerState& state, Clock::time_point begin) {
  step_ = state.step;
  pending_ = true;
  pulse_ = std::make_shared<std::atomic<std::uint64_t>>(0);
  last_pulse_ = 0;
  last_moved_ = Clock::now();
  warning_ = std::make_shared<std::string>();
  const auto coordinator =
      std::make_shared<StoreCoordinator>(store_, fmt::format("{}/{}", options_.name, saves_++),
                                         options_.rank, options_.world_size, options_.timeout);
  committed_ = std::make_shared<std::atomic<bool>>(false);
  const auto write = [coordinator, warning = warning_, committed = committed_,
                      retention = options_.retention,
                      started = last_moved_](const io::SaveRequest& staged) {
    require_finite(staged, *coordinator);
    io::SaveReport report = io::save_checkpoint(staged, *coordinator);
    *committed = true;
    report.seconds = seconds_since(started);
    *warning = prune(staged, retention, *coordinator);
    return report;
  };
  async_->start(
      complete(make_save_request(sharded_, options_.with_optimizer, options_.trainable_only),
               state),
      write);
  stall_ = seconds_since(begin);
}

void Saver::wait_copied() {
  if (!async_) return;
  const auto begin = Clock::now();
  async_->wait_copied();
  stall_ += seconds_since(begin);
}

void Saver::save_here(const TrainerState& state) {
  const auto begin = Clock::now();
  SaveState copy = make_save_state(sharded_, options_.with_optimizer, options_.trainable_only);
  const io::SaveRequest request = complete(std::move(copy.request), state);
  require_finite(request, coordinator_);
  const io::SaveReport report = io::save_checkpoint(request, coordinator_);
  const double seconds = seconds_since(begin);
  const std::string warning = prune(request, options_.retention, coordinator_);
  saved(report, state.step, seconds, seconds_since(begin), warning);
}

// Waits while the save makes progress. @return whether it ended
bool Saver::wait_for_writer(Clock::time_point at_most) {
  for (;;) {
    note_pulse();
    const auto deadline = std::min(at_most, last_moved_ + options_.timeout + kReportMargin);
    if (async_->wait_until(std::min(deadline, Clock::now() + kSlice))) return true;
    if (Clock::now() >= deadline) return false;
  }
}

void Saver::note_pulse() {
  const std::uint64_t pulse = pulse_ ? pulse_->load(std::memory_order_relaxed) : 0;
  if (pulse == last_pulse_) return;
  last_pulse_ = pulse;
  last_moved_ = Clock::now();
}

// Waits until all ranks ended their save, because the next collective has a shorter deadline.
// @return false if a save hangs
bool Saver::wait_for_former(std::int64_t step) {
  const auto begin = Clock::now();
  const bool ended = wait_for_writer(Clock::time_point::max());
  poll();
  const auto answers =
      coordinator_.exchange(fmt::format("former save at step {}", step), ended         ? ""
                                                                         : *committed_ ? "committed"
                                                                                       : "hangs");
  std::vector<std::size_t> hanging;
  bool committed = false;
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    if (!answers[rank].empty()) hanging.push_back(rank);
    committed = committed || answers[rank] == "committed";
  }
  const double seconds = seconds_since(begin);
  if (!hanging.empty()) {
    failed(
        step,
        fmt::format("the save of step {}{} has hung for {} on rank {}, so no other save can begin; "
                    "check that rank's disk, or raise checkpoint.timeout",
                    step_, committed ? ", committed but not read back," : "",
                    format_duration(options_.timeout), fmt::join(hanging, ", ")));
    return false;
  }
  if (seconds >= kReportedWait) {
    notes_.push_back(fmt::format("step {}: waited {:.1f} ms for the save of step {} to end", step,
                                 seconds * 1e3, step_));
  }
  return true;
}

void Saver::poll() {
  if (!async_) return;
  note_pulse();
  const auto finished = async_->take();
  if (!finished) return;
  if (!finished->error) {
    saved(finished->report, finished->step, finished->report.seconds, stall_, *warning_);
    return;
  }
  try {
    std::rethrow_exception(finished->error);
  } catch (const NonFiniteLoss&) {
    fatal_ = finished->error;
  } catch (const InternalError&) {
    fatal_ = finished->error;
  } catch (const std::exception& error) {
    failed(finished->step, error.what());
  }
}

void Saver::saved(const io::SaveReport& report, std::int64_t step, double seconds, double stall,
                  const std::string& warning) {
  saved_step_ = step;
  if (!warning.empty()) notes_.push_back(warning);
  saved_.push_back({step, report.path, report.total_bytes, seconds, stall});
}

void Saver::failed(std::int64_t step, const std::string& why) {
  // A checkpoint that was committed and found damaged does not count.
  if (options_.at_commit) options_.at_commit(saved_step_);
  const char* const then = leaving_             ? ", training ends"
                           : step == last_step_ ? ""
                           : options_.stop_on_error
                               ? ", training ends (checkpoint.on_error is stop)"
                               : ", training continues";
  std::string reason = why;  // without digits, because paths and byte counts vary
  std::erase_if(reason, [](char c) { return c >= '0' && c <= '9'; });
  const bool again = reason == std::exchange(noted_, reason);
  if (!again || step != last_step_) {  // for the last step, finish() throws
    notes_.push_back(
        fmt::format("warning: step {} was not saved{}: {}", step, then,
                    again ? fmt::format("for the same reason as step {}", noted_step_) : why));
  }
  if (!again) noted_step_ = step;
  if (!options_.stop_on_error || step == last_step_ || !failure_.empty()) return;
  failure_ = why;
  failed_step_ = step;
}

void Saver::finish(const TrainerState& state, bool hurry) {
  if (hurry) *hurry_ = true;
  last_step_ = state.step;
  if (failed_step_ == state.step) failure_.clear();  // saved again below, or finish() throws
  if (!async_) {
    const auto answers = coordinator_.exchange(fmt::format("end at step {}", state.step),
                                               saved_step_ == state.step ? "saved" : "");
    if (std::ranges::count(answers, "saved") < options_.world_size) save_last(state);
  } else {
    finish_in_background(state);
  }
  // Detects a rank 0 that hangs while removing old checkpoints.
  coordinator_.exchange(fmt::format("saves ended at step {}", state.step), "");
  require<IoError>(failure_.empty(), "training ended because a save failed: {}", failure_);
}

void Saver::save_last(const TrainerState& state) {
  constexpr int kAttempts = 2;
  for (int attempt = 1;; ++attempt) {
    bool ended = true;
    std::string mine = "saved";
    std::exception_ptr error;
    try {
      ended = save_and_wait(state);
    } catch (const CommError&) {
      throw;
    } catch (const std::exception&) {
      error = std::current_exception();
      mine = options_.retention.damaged->contains(state.step) ? "damaged" : "failed";
    }
    if (!ended) {
      throw IoError("{}", hanging_save({.in_flight = state.step, .committed = *committed_},
                                       state.step, options_.timeout, "this rank"));
    }
    // Exchange results, because a rank that timed out does not know about the damage.
    const auto answers =
        coordinator_.exchange(fmt::format("attempt {} to save step {}", attempt, state.step), mine);
    const auto any = [&](std::string_view what) { return std::ranges::count(answers, what) > 0; };
    if (attempt == kAttempts || !any("damaged") || any("failed")) {
      if (error) std::rethrow_exception(error);
      return;
    }
    const std::string why = message_of(error);
    notes_.push_back(fmt::format("warning: step {} was not saved, trying again: {}", state.step,
                                 why.empty() ? "the checkpoint is damaged" : why));
  }
}

// @return false if the save hangs
bool Saver::save_and_wait(const TrainerState& state) {
  if (!async_) {
    save_here(state);
    return true;
  }
  start(state, Clock::now());
  if (!wait_for_writer(Clock::time_point::max())) {
    async_->set_patience(milliseconds(0));
    return false;
  }
  const auto finished = async_->take();
  if (finished->error) std::rethrow_exception(finished->error);
  saved(finished->report, finished->step, finished->report.seconds, finished->seconds, *warning_);
  return true;
}

void Saver::finish_in_background(const TrainerState& state) {
  const bool ended = wait_for_writer(Clock::time_point::max());
  poll();
  const FinalReport mine{saved_step_, ended ? -1 : step_, !ended && *committed_, failure_,
                         message_of(fatal_)};
  const auto answers =
      coordinator_.exchange(fmt::format("end at step {}", state.step),
                            Json(mine).dump(-1, ' ', false, Json::error_handler_t::replace));
  bool all_saved = true;
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    const FinalReport words = Json::parse(answers[rank]).get<FinalReport>();
    if (fatal_) std::rethrow_exception(fatal_);
    require<NonFiniteLoss>(words.fatal.empty(), "{}", words.fatal);
    if (failure_.empty()) failure_ = words.failure;
    if (words.in_flight >= 0) {
      async_->set_patience(milliseconds(0));
      throw IoError(
          "{}", hanging_save(words, state.step, options_.timeout, fmt::format("rank {}", rank)));
    }
    all_saved = all_saved && words.saved == state.step;
  }
  if (all_saved) return;
  save_last(state);
}

void Saver::leave(milliseconds at_most) noexcept {
  if (!async_) return;
  leaving_ = true;
  try {
    wait_for_writer(Clock::now() + at_most);
    poll();
  } catch (...) {
    // Ignored: the first error is reported.
  }
  async_->set_patience(milliseconds(0));
}

}  // namespace tessera::train
