#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "train/line_file.h"

namespace tessera::train {

/// One training step's line of metrics.jsonl.
struct StepMetrics {
  std::int64_t step = 0;  ///< number of updates before the loss was measured
  double loss = 0;        ///< nats per token over the global batch, before the update
  double grad_norm = 0;   ///< global, before clipping
  double lr = 0;
  double epoch = 0;         ///< passes over the training data by the end of the step
  std::int64_t tokens = 0;  ///< in this step, over all ranks
  double step_ms = 0;
  double tokens_per_s = 0;
  /// Model FLOPs utilization, a fraction; nothing: the device's peak is not known.
  std::optional<double> mfu = {};
  std::int64_t memory_bytes = 0;  ///< peak of rank 0's memory ledger
  bool skipped = false;           ///< no update was made; written only if true
};

struct LossPoint {
  std::int64_t step = 0;
  double loss = 0;
};

/// Receives the metrics of a run.
class MetricsSink {
 public:
  virtual ~MetricsSink() = default;
  virtual void write_step(const StepMetrics& metrics) = 0;
  virtual void write_evaluation(std::int64_t step, double val_loss) = 0;
  /// Writes everything. @throws IoError
  virtual void flush() = 0;
  /// Error that made buffering start since the last call; else empty.
  virtual std::string take_warning() = 0;
};

/// Writes metrics.jsonl: one object per step and per evaluation, without duplicates. `step` counts
/// updates, so a training loss and an evaluation with the same `step` used the same weights. Each
/// line has `time` (seconds since 1970) and `elapsed_s` (since this start). Non-finite values
/// become null. Lines are buffered while the disk is full, see AppendFile.
class MetricsWriter final : public MetricsSink {
 public:
  /// Opens the file and drops lines that a run resumed at `resume_step` writes again; all lines if
  /// it is 0.
  /// @throws IoError
  MetricsWriter(std::filesystem::path path, std::int64_t resume_step);

  /// @throws InternalError if the step was written before
  void write_step(const StepMetrics& metrics) override;
  /// Does nothing if the file has an evaluation of this step.
  void write_evaluation(std::int64_t step, double val_loss) override;
  void flush() override { lines_.flush(); }
  std::string take_warning() override { return lines_.take_warning(); }

  /// Losses in the file so far.
  const std::vector<LossPoint>& train_losses() const { return train_; }
  const std::vector<LossPoint>& val_losses() const { return val_; }

 private:
  bool keep(const nlohmann::json& line, std::int64_t resume_step);
  void write(nlohmann::ordered_json& line);

  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::vector<LossPoint> train_;
  std::vector<LossPoint> val_;
  std::set<std::int64_t> evaluated_;
  LineFile lines_;  // last, because its constructor fills the members above
};

}  // namespace tessera::train
