#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tools/tessera/report/line_file.h"

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
  bool skipped = false;           ///< nothing was updated; in the file only if it is so
};

struct LossPoint {
  std::int64_t step = 0;
  double loss = 0;
};

/// Writes metrics.jsonl: one object per step and evaluation, written line by line, none twice. A
/// value that is not finite is written as null. Lines wait while the disk is full, as LineFile
/// says.
class MetricsWriter {
 public:
  /// Opens the file and drops what a run resumed at `resume_step` will write again: steps from
  /// there on and evaluations after it. At resume_step 0 it starts empty.
  /// @throws IoError
  MetricsWriter(std::filesystem::path path, std::int64_t resume_step);

  /// The write_ functions throw IoError if too many lines wait; this one InternalError if the step
  /// was written before.
  void write_step(const StepMetrics& metrics);
  /// {"step", "val_loss"}; passed over if that step's evaluation is in the file already.
  void write_evaluation(std::int64_t step, double val_loss);
  void flush() { lines_.flush(); }
  std::string take_warning() { return lines_.take_warning(); }

  /// What the file holds by now.
  const std::vector<LossPoint>& train_losses() const { return train_; }
  const std::vector<LossPoint>& val_losses() const { return val_; }

 private:
  bool keep(const nlohmann::json& line, std::int64_t resume_step);

  std::vector<LossPoint> train_;
  std::vector<LossPoint> val_;
  std::set<std::int64_t> evaluated_;
  LineFile lines_;  // after what opening it fills
};

}  // namespace tessera::tools
