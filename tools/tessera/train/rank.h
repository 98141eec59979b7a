#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/flight_recorder.h"
#include "comm/sharding/layout_text.h"
#include "comm/sharding/sharded_model.h"
#include "core/base/trace.h"
#include "models/gpt2.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/metrics.h"
#include "tools/tessera/report/progress.h"
#include "tools/tessera/report/saves.h"
#include "tools/tessera/signal/stop_signal.h"
#include "tools/tessera/train/checkpoints.h"
#include "tools/tessera/train/run_directory.h"
#include "tools/tessera/train/saver.h"
#include "tools/tessera/train/setup.h"
#include "tools/tessera/train/trainer.h"

namespace tessera::tools {

/// Where this rank's trace of train.profile goes.
std::filesystem::path profile_file(const Config& config, int rank);

/// One rank of a run: owns what the steps need, and what only rank 0 shows and writes.
class Rank {
 public:
  /// @param attempt   new for each Rank of a run, the same on all ranks
  /// @param recorder  is told of phases and of an error; not null
  Rank(RunSetup setup, const comm::LaunchEnvironment& environment, comm::RankGroup& group,
       const std::shared_ptr<Context>& context, int attempt, bool json,
       std::shared_ptr<comm::FlightRecorder> recorder);

  /// What must be equal on all ranks before they exchange parameters: see comm::layout_text().
  std::string layout() const { return comm::layout_text(sharded_); }
  /// What it starts from, verified as it is read. All ranks make this call.
  /// @return why the checkpoint to go on from cannot be read, the same on every rank; else empty
  std::string load();
  /// Rank 0: sets aside checkpoints that are later than what was loaded, and opens the files of the
  /// run directory that it writes while training. @throws IoError
  void open_files();
  /// Trains what was loaded, once rank 0 has opened its files.
  /// @return the signal by which it was stopped, or 0
  int run(const StopSignal& stop);

 private:
  bool is_zero() const { return rank_ == 0; }
  TrainerOptions trainer_options();
  std::string resume(int threads);
  void tell_of_loading(const std::filesystem::path& from, const io::LoadReport& report);
  void show_start();
  void profile();
  void write_profile();
  std::vector<std::string> device_notes();
  void evaluate();
  void show_sample();
  void prepare_saves();
  bool due(std::int64_t every) const { return every > 0 && state_.step % every == 0; }
  int train(const StopSignal& stop);
  void save();
  void report_saves();
  void tell_of_metrics();
  void leave(const char* why, std::chrono::milliseconds at_most);
  void note(const std::string& text);
  void finish(double seconds, int signal);

  RunSetup setup_;
  const Config& config_;
  int rank_, world_size_;
  bool json_;
  comm::Communicator& communicator_;
  std::shared_ptr<Context> context_;
  models::Gpt2 model_;
  comm::ShardedModel sharded_;
  Trainer trainer_;
  std::shared_ptr<comm::Store> store_;
  std::shared_ptr<comm::RankStatus> status_;
  StoreCoordinator coordinator_, loading_;
  std::string run_id_;
  std::shared_ptr<comm::FlightRecorder> recorder_;
  RankLog log_;
  TrainerState state_;
  ConsoleStyle style_ = detect_console(STDERR_FILENO);
  std::unique_ptr<MetricsWriter> metrics_;
  std::unique_ptr<SavesWriter> saves_;
  std::unique_ptr<ProgressLine> progress_;
  std::unique_ptr<Trace> trace_;
  std::int64_t evaluated_step_ = -1;
  StepResult last_;
  bool ends_for_save_ = false;
  std::unique_ptr<Saver> saver_;  // null: nothing is saved
};

}  // namespace tessera::tools
