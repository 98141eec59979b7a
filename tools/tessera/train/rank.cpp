#include "tools/tessera/train/rank.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/sharding/replica_check.h"
#include "core/base/clock.h"
#include "core/base/device_backend.h"
#include "core/base/fault_point.h"
#include "core/base/memory.h"
#include "core/base/product_tuning.h"
#include "core/base/system_memory.h"
#include "core/base/thread_pool.h"
#include "io/consolidate/side_files.h"
#include "tools/tessera/model/text_generation.h"
#include "tools/tessera/plot/panels.h"
#include "tools/tessera/train/model_flops.h"
#include "tools/tessera/train/resume.h"
#include "tools/tessera/train/summary.h"
#include "train/fault_line.h"
#include "train/tensorboard.h"
#include "train/tuned_products.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Added to the timeout of a save in exchanges, because other ranks may still wait for their save.
constexpr std::chrono::milliseconds kLateForSave{5000};
constexpr int kReadingThreads = 4;
// Longest wait for a save after the loss of a rank; below the launcher's grace.
constexpr std::chrono::milliseconds kWithoutPeers{300};

// Run id and step as a file name: special characters become '_'.
std::string file_name_of(const std::string& run_id, std::int64_t step) {
  std::string name = run_id.empty() ? "run" : run_id.substr(0, 64);
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '-') c = '_';
  return fmt::format("{}-{}", name, step);
}

// Copies files of model.init_from into the run, for its exports: generation_config.json and, for a run
// on token files, the tokenizer.
void keep_side_files(const io::ModelSource& from, const fs::path& run_dir, bool tokenizer) {
  const fs::path source = from.checkpoint() ? from.path() / "../../tokenizer" : from.path();
  std::error_code error;
  for (const fs::path& file : io::list_directory(source, error)) {
    const std::string name = file.filename().string();
    if (!io::is_side_file(name) || io::is_config_file(name)) continue;
    if (!tokenizer && name != io::kGenerationFile) continue;
    io::make_directories_durably(run_dir / "tokenizer");
    io::write_file_atomically(run_dir / "tokenizer" / name,
                              io::read_file(file, std::int64_t{64} << 20));
  }
}

}  // namespace

fs::path profile_file(const Config& config, int rank) {
  fs::path file = config.train.profile;
  if (rank > 0) file += fmt::format(".rank-{}", rank);
  return file;
}

Rank::Rank(RunSetup setup, const RankPlan& plan, const comm::LaunchEnvironment& environment,
           comm::RankGroup& group, const std::shared_ptr<Context>& context, int attempt, bool json,
           RankFlight& flight)
    : setup_(std::move(setup)),
      config_(setup_.config),
      rank_(environment.rank),
      world_size_(environment.world_size),
      json_(json),
      communicator_(*group.communicator),
      context_(context),
      model_(make_model(config_, setup_.model)),
      plan_(plan),
      mesh_(communicator_, shard_group_size(config_, world_size_, environment.local_world_size)),
      sharded_(*model_, mesh_, shard_spec_of(config_), context_),
      optimizer_(make_optimizer(config_)),
      trainer_(sharded_, *optimizer_, loss_of(*model_), trainer_options()),
      loader_(*setup_.train, communicator_, context_, loader_options(config_)),
      store_(group.store),
      status_(group.status),
      coordinator_(store_, fmt::format("training/{}", attempt), rank_, world_size_,
                   to_milliseconds(config_.checkpoint.timeout) + kLateForSave),
      loading_(store_, fmt::format("loading/{}", attempt), rank_, world_size_,
               to_milliseconds(config_.checkpoint.load_timeout)),
      run_id_(file_name_of(environment.run_id, setup_.state.step)),
      flight_(flight),
      log_(config_.run.out, rank_),
      state_(setup_.state) {
  if (setup_.val)
    val_loader_ = std::make_unique<train::Loader>(*setup_.val, communicator_, context_,
                                                  loader_options(config_));
  model_->set_recompute(nn::parse_recompute(config_.train.recompute));
  context_->set_deterministic(config_.train.deterministic == "on");
  tunes_ = context_->device().type == DeviceType::CUDA && !tuned_products_file(config_).empty();
  if (tunes_) context_->backend().product_tuning().use(setup_.tuned_products, 0);
  if (setup_.dataset.tokenizer) state_.tokenizer = setup_.dataset.tokenizer->to_json();
  state_.config = to_json(config_).dump();
  if (is_zero() && context_->device().type == DeviceType::CUDA) {
    std::set<std::pair<std::string, std::string>> devices;  // ranks may share one
    for (const comm::Hello& hello : group.ranks) devices.emplace(hello.host, hello.device);
    mfu_per_rate_ =
        mfu_per_rate(config_, setup_.model, context_->backend().description(), std::ssize(devices));
  }
}

train::TrainerOptions Rank::trainer_options() {
  train::TrainerOptions options = tools::trainer_options(config_);
  options.exchange = [this](const std::string& name, const std::string& text) {
    return coordinator_.exchange(name, text);
  };
  return options;
}

void Rank::note(const std::string& text) {
  log_.write(text);
  if (progress_) progress_->note(text);
}

std::string Rank::load() {
  status_->enter("load", state_.step);
  // Reads block on disks, so more threads than processors help.
  const int threads = std::max(kReadingThreads, context_->threads().size());
  const auto seed = static_cast<std::uint64_t>(config_.train.seed);
  if (setup_.resume) {
    if (std::string why = resume(threads); !why.empty()) return why;
  } else if (setup_.adapters) {
    log_loading(setup_.adapters->path(),
                train::load_weights(sharded_, *setup_.adapters, setup_.load, threads, seed,
                                    setup_.init_from.get()));
  } else if (setup_.init_from) {
    log_loading(setup_.init_from->path(),
                train::load_weights(sharded_, *setup_.init_from, setup_.load, threads, seed));
  } else {
    sharded_.initialize(seed);
  }
  sharded_.create_optimizer_state(*optimizer_);
  return {};
}

std::string Rank::resume(int threads) {
  std::string problem;
  try {
    log_loading(setup_.resume->path(),
                train::load_training_state(sharded_, *optimizer_, *setup_.resume, setup_.load,
                                           threads, static_cast<std::uint64_t>(config_.train.seed),
                                           setup_.init_from.get()));
  } catch (const CorruptCheckpoint& error) {
    problem = error.what();
  } catch (const IoError& error) {
    problem = error.what();
  }
  const auto problems = loading_.exchange("loaded", problem);
  for (std::size_t rank = 0; rank < problems.size(); ++rank) {
    if (problems[rank].empty()) continue;
    return world_size_ == 1 ? problems[rank] : fmt::format("rank {}: {}", rank, problems[rank]);
  }
  return {};
}

void Rank::log_loading(const fs::path& from, const io::ReadReport& report) {
  log_.write(fmt::format("loaded {} from {} in {:.2f} s, {} read from disk",
                         format_bytes(report.wanted_bytes), from.string(), report.seconds,
                         format_bytes(report.read_bytes)));
}

void Rank::open_files() {
  const fs::path out = config_.run.out;
  io::write_file_atomically(out / "config.json", to_json(config_).dump(2) + "\n");
  if (setup_.init_from) keep_side_files(*setup_.init_from, out, !setup_.dataset.tokenizer);
  std::error_code absent;
  if (state_.step == 0 && fs::file_size(out / "metrics.jsonl", absent) > 0 && !absent) {
    io::rename_path(out / "metrics.jsonl", out / "metrics.previous.jsonl");
    setup_.notes.push_back(
        "note: no checkpoint to resume from; the earlier metrics are in metrics.previous.jsonl");
  }
  metrics_ = std::make_unique<train::MetricsWriter>(out / "metrics.jsonl", state_.step);
  if (config_.run.tensorboard == "on") {
    auto& sink = more_metrics_.emplace_back(
        std::make_unique<train::TensorBoardWriter>(out / "tensorboard", state_.step));
    if (state_.val_loss) sink->write_evaluation(state_.step, *state_.val_loss);
  }
  if (config_.checkpoint.every > 0)
    saves_ =
        std::make_unique<train::LineFile>(out / "saves.jsonl", [this](const nlohmann::json& line) {
          return line["step"].get<std::int64_t>() <= state_.step;
        });
  // Last, so that a refused start does not touch checkpoints.
  for (std::string& text : set_aside_later(out, state_.step))
    setup_.notes.push_back("warning: " + std::move(text));
}

void Rank::show_start() {
  if (!is_zero()) return;
  std::cerr << start_table(style_, setup_, sharded_, communicator_, *context_, plan_);
  progress_ = std::make_unique<ProgressLine>(std::cerr, style_, state_.step, config_.train.steps,
                                             config_.train.log_every);
  for (const std::string& text : setup_.notes) note(text);
}

int Rank::evaluate(const StopSignal& stop) {
  if (!val_loader_ || evaluated_step_ == state_.step) return 0;
  status_->enter("evaluate", state_.step);
  const train::Trainer::Evaluation result =
      trainer_.evaluate(*val_loader_, config_.train.eval_batches, [this, &stop] {
        // SIGUSR1 lets the run make a step first.
        const bool made_step = state_.step > setup_.state.step;
        const int signal = stop.received();
        return made_step || signal != SIGUSR1 ? signal : 0;
      });
  if (result.stop_signal != 0) return result.stop_signal;
  evaluated_step_ = state_.step;
  const double loss = result.loss;
  state_.val_loss = loss;
  if (is_zero()) {
    for_metrics([&](train::MetricsSink& sink) { sink.write_evaluation(state_.step, loss); });
    note(fmt::format("step {}: validation loss {:.4f}", state_.step, loss));
  }
  show_sample();
  return 0;
}

void Rank::show_sample() {
  if (config_.train.sample_prompt.empty()) return;
  sharded_.gather_all();
  if (is_zero()) {
    const io::Tokenizer& tokenizer = *setup_.dataset.tokenizer;
    const RngKey key = RngKey::make(static_cast<std::uint64_t>(config_.train.seed),
                                    RngPurpose::Sampling, static_cast<std::uint64_t>(state_.step));
    const auto text = tokenizer.encode(config_.train.sample_prompt, "train.sample_prompt");
    auto prompt = tokenizer.prefix();
    prompt.insert(prompt.end(), text.begin(), text.end());
    TextStream stream(tokenizer);
    stream.next(text);
    const auto ids =
        generate(*model_, context_, {prompt}, {.count = config_.train.sample_tokens, .key = key});
    note(fmt::format("step {}: sample\n{}{}", state_.step, config_.train.sample_prompt,
                     printable(stream.next(ids[0]))));
  }
  // Other ranks wait here for rank 0, because the next collective has a shorter deadline.
  coordinator_.exchange(fmt::format("sample at step {}", state_.step), "");
  sharded_.end_evaluation();
}

void Rank::compare_replicas() {
  if (compared_step_ == state_.step) return;
  comm::check_replicas(sharded_);
  compared_step_ = state_.step;
}

void Rank::prepare_saves() {
  const Config::Checkpoint& config = config_.checkpoint;
  if (setup_.resume) saved_step_ = state_.step;
  if (config.every == 0) return;
  train::SaverOptions options{
      .checkpoints_dir = fs::path(config_.run.out) / "checkpoints",
      .run_id = run_id_,
      .rank = rank_,
      .world_size = world_size_,
      .model = models::to_json(setup_.model),
      .with_optimizer = config.what == "all",
      .trainable_only = setup_.model.lora.has_value(),
      .in_background = saves_beside_training(config_, state_.step),
      .stop_on_error = config.on_error == "stop",
      .retention = {static_cast<int>(config.keep), config.keep_every,
                    static_cast<int>(config.keep_best), train::stored_val_loss},
      .timeout = to_milliseconds(config.timeout),
      .saved_step = saved_step_,
      .at_point =
          [](std::string_view point) { fault_point(("save/" + std::string(point)).c_str()); },
      .at_commit = &StopSignal::set_saved};
  saver_ = std::make_unique<train::Saver>(std::move(options), store_, coordinator_, sharded_);
}

void Rank::save() {
  status_->enter("save", state_.step);
  saver_->save(state_);
  report_saves();
}

void Rank::report_full_disk(const std::string& why) {
  if (why.empty() || std::exchange(reported_full_disk_, true)) return;
  note(fmt::format("warning: metrics stay in memory until they can be written: {}", why));
}

void Rank::report_saves() {
  if (!saver_) return;
  saver_->poll();
  for (const train::Saved& saved : saver_->take_saved()) {
    saved_step_ = saved.step;
    const double gb_per_s = static_cast<double>(saved.bytes) / 1e9 / saved.seconds;
    const double stall_ms = saved.stall_seconds * 1e3;
    if (is_zero())
      saves_->write({{"step", saved.step},
                     {"bytes", saved.bytes},
                     {"seconds", saved.seconds},
                     {"gb_per_s", gb_per_s},
                     {"stall_ms", stall_ms}});
    note(fmt::format("step {}: saved {} ({} in {}, {:.2f} GB/s; stalled training for {:.1f} ms)",
                     saved.step, saved.path.string(), format_bytes(saved.bytes),
                     format_duration(saved.seconds), gb_per_s, stall_ms));
  }
  for (const std::string& text : saver_->take_notes()) note(text);
}

// Waits for the save in flight after an error.
void Rank::leave(const char* why, std::chrono::milliseconds at_most) {
  const auto step = saver_ ? saver_->in_flight() : std::nullopt;
  if (!step) return;
  try {
    const std::string_view text = why;
    note(fmt::format("training ends ({0}); waiting at most {2} for the save of step {1}",
                     text.substr(0, text.find('\n')), *step, format_duration(at_most)));
    saver_->leave(at_most);
    report_saves();
  } catch (const std::exception&) {
    // Ignored: the first error is reported.
  }
}

// Traces three steps after two warm-up steps.
void Rank::profile() {
  constexpr std::int64_t kSkipped = 2, kTraced = 3;
  if (config_.train.profile.empty()) return;
  const std::int64_t first = std::min(setup_.state.step + kSkipped, config_.train.steps - 1);
  if (state_.step == first) trace_ = std::make_unique<Trace>(*context_);
  if (state_.step == first + kTraced) write_profile();
}

void Rank::write_profile() {
  if (!trace_) return;
  const fs::path file = profile_file(config_, rank_);
  try {
    const std::map<std::string, std::string> about = {
        {"device", context_->device().type == DeviceType::CUDA ? "cuda" : "cpu"},
        {"precision", config_.train.precision},
        {"ranks", std::to_string(world_size_)},
        {"threads", std::to_string(context_->threads().size())}};
    io::write_file_atomically(file, trace_->to_json(rank_, fmt::format("rank {}", rank_), about));
    note(fmt::format("step {}: wrote a trace of the last steps to {}", state_.step, file.string()));
  } catch (const IoError& error) {
    note(fmt::format("warning: the trace of the last steps is lost: {}", error.what()));
  }
  trace_.reset();
  traced_ = true;
}

void Rank::show_progress(StopSignal& stop) const {
  stop.set_progress(saver_ ? StopSignal::Stage::Training : StopSignal::Stage::TrainingWithoutSaves,
                    state_.step);
}

// After the first step of this process: all ranks use the kernels that rank 0 has timed in it.
void Rank::agree_on_products() {
  if (!std::exchange(tunes_, false)) return;
  ProductTuning& tuning = context_->backend().product_tuning();
  const TunedProducts timed = tuning.take_timed();
  const std::string text =
      coordinator_.exchange("tuned products", is_zero() ? train::format_tuned_products(timed) : "")
          .front();
  merge(setup_.tuned_products, train::parse_tuned_products(text, "rank 0's tuned products"));
  tuning.use(setup_.tuned_products, 0);
  if (timed.empty()) return;
  const fs::path file = tuned_products_file(config_);
  const std::size_t count = timed.begin()->second.size();
  try {
    train::add_tuned_products(file, timed);
    note(fmt::format("tuned {} matrix product{} and added {} to {}", count, count == 1 ? "" : "s",
                     count == 1 ? "it" : "them", file.string()));
  } catch (const std::exception& error) {
    note(fmt::format(
        "warning: {} tuned matrix products are not written, and a resumed run will time "
        "them again: {}",
        count, error.what()));
  }
}

int Rank::train(StopSignal& stop) {
  const std::int64_t tokens = config_.train.global_batch * config_.model.seq_len;
  int signal = 0;
  const auto evaluation_due = [this] {
    return due(config_.train.eval_every) ||
           (saver_ && config_.checkpoint.keep_best > 0 && due(config_.checkpoint.every));
  };
  // Run the evaluation that the previous process skipped when a signal stopped it.
  if (state_.step > 0 && !state_.val_loss && evaluation_due()) signal = evaluate(stop);
  if (tunes_) {
    // The other ranks wait in a collective meanwhile.
    const double seconds = is_zero() ? static_cast<double>(config_.comm.timeout) / 3 : 0;
    context_->backend().product_tuning().use(setup_.tuned_products, seconds);
  }
  while (state_.step < config_.train.steps && signal == 0) {
    const auto step_started = Clock::now();
    const std::int64_t waited_before = communicator_.waited_ns();
    status_->enter("step", state_.step);
    profile();
    last_ =
        trainer_.step(state_.step, state_.position, loader_, [&stop] { return stop.received(); });
    const double seconds = seconds_since(step_started);
    status_->worked(seconds -
                    static_cast<double>(communicator_.waited_ns() - waited_before) * 1e-9);
    agree_on_products();
    if (is_zero()) {
      const train::StepMetrics metrics{
          .step = state_.step,
          .loss = last_.loss,
          .grad_norm = last_.grad_norm,
          .lr = last_.lr,
          .epoch = static_cast<double>(state_.position + config_.train.global_batch) /
                   static_cast<double>(setup_.train->samples_per_epoch()),
          .tokens = tokens,
          .step_ms = seconds * 1e3,
          .tokens_per_s = static_cast<double>(tokens) / seconds,
          .mfu = mfu_per_rate_ > 0
                     ? std::optional(mfu_per_rate_ * static_cast<double>(tokens) / seconds)
                     : std::nullopt,
          .memory_bytes = context_->ledger().total().peak,
          .skipped = !last_.skipped.empty()};
      for_metrics([&](train::MetricsSink& sink) { sink.write_step(metrics); });
      progress_->update(metrics);
    }
    if (!last_.skipped.empty()) note("warning: skipped: " + last_.skipped);
    if (context_->device().type == DeviceType::CUDA)
      for (const std::string& text : context_->backend().take_notes()) note(text);
    if (is_zero()) {
      for_metrics([&](train::MetricsSink& sink) { report_full_disk(sink.take_warning()); });
      if (saves_) report_full_disk(saves_->take_warning());
    }
    ++state_.step;
    state_.position += config_.train.global_batch;
    state_.val_loss.reset();
    const std::int64_t every = config_.shard.check_replicas_every;
    if (due(every) || (every > 0 && saver_ && due(config_.checkpoint.every))) compare_replicas();
    signal = last_.stop_signal;
    ends_for_save_ = saver_ && saver_->agree(state_.step);
    report_saves();
    show_progress(stop);
    if (signal != 0 || ends_for_save_) break;
    if (evaluation_due()) signal = evaluate(stop);
    if (signal == 0 && saver_ && due(config_.checkpoint.every)) save();
  }
  return signal;
}

int Rank::run(StopSignal& stop) {
  prepare_saves();
  show_start();
  // Close the files of the loaded model.
  setup_.resume.reset();
  setup_.init_from.reset();
  setup_.adapters.reset();
  // Before the log says that training starts: from then on a signal is answered as in training.
  stop.set_saved(saved_step_);
  show_progress(stop);
  log_.write(fmt::format("start at step {}", state_.step));
  const auto started = Clock::now();
  int signal = 0;
  std::exception_ptr not_saved;
  try {
    signal = train(stop);
    sharded_.release();
    write_profile();
    if (!config_.train.profile.empty() && !traced_)
      note("no trace was written: no step ran after the first two");
    if (signal == 0 && !ends_for_save_) signal = evaluate(stop);
    status_->enter("finish", state_.step);
    try {
      if (saver_ && config_.shard.check_replicas_every > 0) compare_replicas();
      if (saver_) saver_->finish(state_, signal != 0);
    } catch (const IoError&) {
      not_saved = std::current_exception();
    }
    report_saves();
    // Checkpoints are complete without metrics.
    const auto flush = [this](auto& file) {
      try {
        file.flush();
      } catch (const IoError& error) {
        note(fmt::format("warning: metrics are incomplete: {}", error.what()));
      }
    };
    if (is_zero()) for_metrics(flush);
    if (saves_) flush(*saves_);
  } catch (const CommError& error) {
    flight_.fail(error);
    // A save can't complete without the lost rank.
    leave(error.what(), kWithoutPeers);
    throw;
  } catch (const std::exception& error) {
    flight_.fail(error);
    // Publish first, so that other ranks report this error instead of a lost rank.
    const bool alone =
        world_size_ > 1 && train::tell_others(*store_, rank_, status_->state().process, error);
    leave(error.what(), alone ? kWithoutPeers : to_milliseconds(config_.checkpoint.timeout));
    throw;
  }
  log_.write(fmt::format("memory: peak {} bytes, planned {} bytes", context_->ledger().total().peak,
                         plan_.peak));
  log_.write(fmt::format("memory by category: peak {}, planned {}",
                         fmt::join(train::category_peaks(context_->ledger()), " "),
                         fmt::join(plan_.most, " ")));
  log_.write(fmt::format("memory of operations: peak {}; planned {}",
                         train::workspace_peaks(context_->ledger()), plan_.workspace));
  if (context_->device().type == DeviceType::CUDA)
    log_.write(fmt::format("host memory: peak {} bytes, planned {} bytes",
                           context_->host_ledger().total().peak, plan_.host_peak));
  log_.write(fmt::format("end at step {}", state_.step));
  finish(seconds_since(started), signal);
  if (not_saved) std::rethrow_exception(not_saved);
  return signal;
}

void Rank::finish(double seconds, int signal) {
  if (!is_zero()) return;
  try {
    if (!metrics_->train_losses().empty())
      io::write_file_atomically(fs::path(config_.run.out) / "loss.svg",
                                loss_picture(config_.run.out));
  } catch (const IoError& error) {
    if (!reported_full_disk_) note(fmt::format("warning: no loss curve: {}", error.what()));
  }
  progress_->finish();
  std::cerr << end_summary(style_, setup_, *metrics_, state_, setup_.state.step, seconds, signal,
                           train::newest_step(config_.run.out), *context_, plan_);
  if (json_) {
    nlohmann::ordered_json summary;
    summary["step"] = state_.step;
    summary["position"] = state_.position;
    summary["stopped_by_signal"] = signal;
    if (!metrics_->train_losses().empty()) {
      summary["loss"] = metrics_->train_losses().back().loss;
    }
    if (!metrics_->val_losses().empty()) {
      summary["val_loss"] = metrics_->val_losses().back().loss;
    }
    summary["seconds"] = seconds;
    summary["memory_peak_bytes"] = context_->ledger().total().peak;
    summary["memory_planned_bytes"] = plan_.peak;
    if (const std::int64_t bytes = peak_resident_bytes(); bytes > 0)
      summary["resident_peak_bytes"] = bytes;
    if (setup_.packing) summary["conversations"] = to_json(*setup_.packing);
    if (setup_.val_packing) summary["val_conversations"] = to_json(*setup_.val_packing);
    summary["run"] = config_.run.out;
    std::cout << summary.dump() << std::endl;
  }
}

}  // namespace tessera::tools
