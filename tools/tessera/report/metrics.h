#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tessera::tools {

/// One training step's line of metrics.jsonl.
struct StepMetrics {
  std::int64_t step = 0;  ///< from 0
  double loss = 0;        ///< nats per token over the global batch, before the update
  double grad_norm = 0;   ///< global, before clipping
  double lr = 0;
  std::int64_t tokens = 0;  ///< of this step, over all ranks
  double step_ms = 0;
  double tokens_per_s = 0;
  std::int64_t memory_bytes = 0;  ///< peak of this rank's ledger
};

/// A committed checkpoint's line of metrics.jsonl.
struct SaveMetrics {
  std::int64_t step = 0;   ///< updates made
  std::int64_t bytes = 0;  ///< of all ranks' shards
  double seconds = 0;      ///< from the step's end to the commit
  double stall_ms = 0;     ///< that rank 0 did not train for it
};

struct LossPoint {
  std::int64_t step = 0;
  double loss = 0;
};

/// Writes metrics.jsonl: one object per step, evaluation and save, written line by line, none
/// twice. A value that is not finite is written as null.
///
/// A full disk must not end a run that goes on without a save: lines that cannot be written wait in
/// memory, at most 1 MiB of them, and go with the next one that can.
class MetricsWriter {
 public:
  /// Opens the file and drops what a run resumed at `resume_step` will write again: steps from
  /// there on, evaluations and saves after it, and a last line that a crash has cut. At resume_step
  /// 0 it starts empty. The file is replaced by a rename, so it is never seen half written.
  /// @throws IoError
  MetricsWriter(std::filesystem::path path, std::int64_t resume_step);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  /// The write_ functions throw IoError if too many lines wait; this one InternalError if the step
  /// was written before.
  void write_step(const StepMetrics& metrics);
  /// {"step", "val_loss"}; passed over if that step's evaluation is in the file already.
  void write_evaluation(std::int64_t step, double val_loss);
  /// {"step", "save_bytes", "save_seconds", "save_gb_per_s", "save_stall_ms"}. Its place is where
  /// the save had ended, so steps after its own may come before it.
  void write_save(const SaveMetrics& save);
  /// Writes lines that wait. @throws IoError naming the file if it cannot
  void flush();
  /// Why lines wait, if they do since the last call; else empty.
  std::string take_warning() { return std::exchange(warning_, {}); }

  /// What the file holds by now.
  const std::vector<LossPoint>& train_losses() const { return train_; }
  const std::vector<LossPoint>& val_losses() const { return val_; }

 private:
  void keep_lines_before(std::int64_t resume_step);
  void write_line(const std::string& line);
  std::string write_waiting();

  std::filesystem::path path_;
  int fd_ = -1;
  std::string waiting_;  // lines, the first maybe without its beginning
  std::string warning_;
  std::vector<LossPoint> train_;
  std::vector<LossPoint> val_;
  std::set<std::int64_t> evaluated_;
};

}  // namespace tessera::tools
