#pragma once

#include <filesystem>
#include <string>

#include "train/append_file.h"
#include "train/metrics.h"

namespace tessera::train {

/// Writes scalars by step as a TensorBoard event file: train/loss, train/grad_norm, train/lr,
/// speed/step_ms, speed/tokens_per_s, speed/mfu if known, memory/peak_bytes and validation/loss. A
/// resumed run adds a file; TensorBoard then hides the steps it repeats.
/// Source: tensorflow/core/util/event.proto and record_writer (TFRecord).
class TensorBoardWriter final : public MetricsSink {
 public:
  /// Creates the directory and a file in it. @throws IoError
  TensorBoardWriter(const std::filesystem::path& directory, std::int64_t first_step);

  void write_step(const StepMetrics& metrics) override;
  void write_evaluation(std::int64_t step, double val_loss) override;
  void flush() override { file_.flush(); }
  std::string take_warning() override { return file_.take_warning(); }

 private:
  void write_scalars(std::int64_t step, const std::vector<std::pair<const char*, double>>& scalars);

  AppendFile file_;
};

}  // namespace tessera::train
