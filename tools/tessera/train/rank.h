#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/sharding/layout_text.h"
#include "comm/sharding/sharded_model.h"
#include "core/base/trace.h"
#include "models/language_model.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/progress.h"
#include "tools/tessera/signal/stop_signal.h"
#include "tools/tessera/train/checkpoints.h"
#include "tools/tessera/train/flight.h"
#include "tools/tessera/train/memory_plan.h"
#include "tools/tessera/train/run_directory.h"
#include "tools/tessera/train/setup.h"
#include "train/line_file.h"
#include "train/metrics.h"
#include "train/saver.h"
#include "train/trainer.h"

namespace tessera::tools {

std::filesystem::path profile_file(const Config& config, int rank);

/// One rank of a run: model, trainer, saves; on rank 0 also console and metrics.
class Rank {
 public:
  /// @param attempt  unique for each Rank object of a run, equal on all ranks
  /// @param flight   must outlive this
  Rank(RunSetup setup, const RankPlan& plan, const comm::LaunchEnvironment& environment,
       comm::RankGroup& group, const std::shared_ptr<Context>& context, int attempt, bool json,
       RankFlight& flight);

  /// Parameter layout to compare among ranks: see comm::layout_text().
  std::string layout() const { return comm::layout_text(sharded_); }
  /// Loads or initializes the weights, verifying checksums. Collective.
  /// @return why the checkpoint can't be read, equal on all ranks; else empty
  std::string load();
  /// On rank 0: opens the files of the run directory and renames checkpoints later than the loaded
  /// one to `.unusable`. @throws IoError
  void open_files();
  /// Trains; call it after open_files() on rank 0.
  /// @return the signal that stopped training, or 0
  int run(StopSignal& stop);

 private:
  bool is_zero() const { return rank_ == 0; }
  train::TrainerOptions trainer_options();
  std::string resume(int threads);
  void log_loading(const std::filesystem::path& from, const io::ReadReport& report);
  void show_start();
  void profile();
  void write_profile();
  /// @return a stop signal that ended the evaluation early, or 0
  int evaluate(const StopSignal& stop);
  void show_sample();
  void compare_replicas();
  void prepare_saves();
  template <typename F>
  void for_metrics(F f) {
    f(static_cast<train::MetricsSink&>(*metrics_));
    for (const auto& sink : more_metrics_) f(*sink);
  }
  bool due(std::int64_t every) const { return every > 0 && state_.step % every == 0; }
  int train(StopSignal& stop);
  void agree_on_products();
  void show_progress(StopSignal& stop) const;
  void save();
  void report_saves();
  void report_full_disk(const std::string& why);
  void leave(const char* why, std::chrono::milliseconds at_most);
  void note(const std::string& text);
  void finish(double seconds, int signal);

  RunSetup setup_;
  const Config& config_;
  int rank_, world_size_;
  bool json_;
  comm::Communicator& communicator_;
  std::shared_ptr<Context> context_;
  std::unique_ptr<models::LanguageModel> model_;
  const RankPlan plan_;
  comm::Mesh mesh_;
  comm::ShardedModel sharded_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  train::Trainer trainer_;
  train::Loader loader_;
  std::unique_ptr<train::Loader> val_loader_;  // null: no validation data
  std::shared_ptr<comm::Store> store_;
  std::shared_ptr<comm::RankStatus> status_;
  train::StoreCoordinator coordinator_, loading_;
  std::string run_id_;
  RankFlight& flight_;
  RankLog log_;
  train::TrainerState state_;
  ConsoleStyle style_ = detect_console(STDERR_FILENO);
  std::unique_ptr<train::MetricsWriter> metrics_;
  std::vector<std::unique_ptr<train::MetricsSink>> more_metrics_;
  std::unique_ptr<train::LineFile> saves_;
  std::unique_ptr<ProgressLine> progress_;
  std::unique_ptr<Trace> trace_;
  bool traced_ = false;  // a profile was written
  bool tunes_ = false;   // tuned products are not agreed yet
  bool reported_full_disk_ = false;
  std::int64_t evaluated_step_ = -1, saved_step_ = -1, compared_step_ = -1;
  double mfu_per_rate_ = 0;  // MFU at one token per second; 0: not known
  train::StepResult last_;
  bool ends_for_save_ = false;
  std::unique_ptr<train::Saver> saver_;  // null: checkpoint.every is 0
};

}  // namespace tessera::tools
