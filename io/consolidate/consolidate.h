#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "io/base/file.h"

namespace tessera::io {

/// HF: names and files of a Hugging Face model directory. Safetensors: our names, nothing else.
enum class ExportFormat { HF, Safetensors };
enum class ExportWhat { Model, Optimizer, All };

struct ConsolidateOptions {
  ExportFormat format = ExportFormat::HF;
  ExportWhat what = ExportWhat::Model;
  std::optional<DType> dtype;  ///< F32 or BF16 for weights; empty keeps what is stored
  std::int64_t max_shard_size = 5'000'000'000;    ///< bytes of tensors in one file
  std::int64_t memory = std::int64_t{256} << 20;  ///< bytes of all buffers together
  std::optional<std::int64_t> step;               ///< of a run; empty: the newest committed one
  int jobs = 1;                                   ///< threads that copy
  bool overwrite = false;                         ///< replace an earlier export at `out`
  /// Called from one thread at a time with bytes written and bytes in all.
  std::function<void(std::int64_t done, std::int64_t total)> progress;
};

struct ConsolidateReport {
  fs::path source;                   ///< the checkpoint or directory that was read
  std::optional<std::int64_t> step;  ///< of the checkpoint
  std::vector<std::string> files;    ///< in `out`
  std::int64_t tensors = 0;
  std::int64_t parameters = 0;  ///< elements of the model, if it was written
  std::int64_t bytes = 0;       ///< of tensor data written
  double seconds = 0;
};

/// Makes a whole model of a checkpoint's shards (or of a Hugging Face directory, to convert it).
///
/// Copies ranges of bytes through buffers of `memory` bytes, whatever the model's size, and
/// verifies checksums as it reads. Writes into `<out>.<host>-<pid>.tmp` beside `out`, syncs, and
/// renames; removes what killed processes of this host left there. `out` is complete or absent (or
/// still the former export). HF: model.safetensors, or shards and model.safetensors.index.json,
/// config.json, generation_config.json, and tokenizer_tessera.json if the run's trainer.json has a
/// tokenizer. Safetensors: our names; moments go to optimizer.safetensors as "exp_avg/NAME";
/// tessera.json holds step and model configuration.
/// @throws InvalidArgument if `out` exists and may not be replaced, or the options do not fit;
///         IoError, CorruptCheckpoint
ConsolidateReport consolidate(const fs::path& source, const fs::path& out,
                              const ConsolidateOptions& options = {});

}  // namespace tessera::io
