#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/error.h"
#include "core/base/shape.h"
#include "io/base/file.h"
#include "io/source/names.h"

namespace tessera::io {

/// HF: names and files of a Hugging Face model directory. Safetensors: our names, nothing else.
enum class ExportFormat { HF, Safetensors };
enum class ExportWhat { Model, Optimizer, All };

/// In bytes of output files.
struct ConsolidateProgress {
  std::int64_t done = 0;
  std::int64_t total = 0;
  std::int64_t reused = 0;  ///< part of `done` that an earlier call wrote
};

struct ConsolidateOptions {
  ExportFormat format = ExportFormat::HF;
  ExportWhat what = ExportWhat::Model;
  std::optional<DType> dtype;  ///< F32 or BF16 for weights; empty keeps what is stored
  std::int64_t max_shard_size = 5'000'000'000;    ///< bytes of tensors in one file
  std::int64_t memory = std::int64_t{256} << 20;  ///< bytes of all buffers together
  std::optional<std::int64_t> step;               ///< of a run; empty: the newest committed one
  int jobs = 1;                                   ///< threads that copy
  bool overwrite = false;                         ///< replace an earlier export at `out`
  /// For names of somebody else's shards, but not of Hugging Face directories. The default is made
  /// to fit a model that config.json names: see open_consolidate_source.
  NameRules names;
  /// Patterns (see is_chosen) of the tensors to export, by our names or those that `names` leaves;
  /// moments go with their weight. Empty: all.
  std::vector<std::string> tensors;
  std::optional<fs::path> config_file;  ///< Hugging Face's config.json, if it is not in the source
  /// How many shards there must be: of a PyTorch DCP as safetensors, which does not say it.
  std::optional<std::int64_t> shards;
  /// Read and write past the page cache where the file system can do that; false: leave what was
  /// written in the cache, for a program that reads it at once.
  bool direct_io = true;
  /// Called from one thread at a time, every few MiB. False stops with ConsolidationStopped.
  std::function<bool(const ConsolidateProgress&)> progress;
  /// Called with each warning before anything is written: those of ConsolidatePlan, and one if an
  /// unfinished export is removed.
  std::function<void(const std::string&)> warn;
};

/// An entry of a source that is not exported.
struct SkippedEntry {
  std::string name;  ///< at the source
  std::string why;   ///< "optimizer state, written with --what all", "no tensor", ...
};

/// Output of a consolidation, before it is written.
struct ConsolidatePlan {
  struct Tensor {
    std::string source_name, name, file;
    Shape shape;
    DType stored = DType::F32, written = DType::F32;
    std::int64_t bytes = 0;  ///< as written
    /// safetensors' name of a dtype that tessera lacks, which is copied as it is; stored and
    /// written are then an integer of as many bytes.
    std::string opaque_dtype;
  };
  struct File {
    std::string name;
    std::int64_t bytes = 0;
  };
  fs::path source;
  std::string kind;             ///< as in ConsolidateReport
  std::vector<Tensor> tensors;  ///< in the order in which they are written
  std::vector<SkippedEntry> skipped;
  std::vector<File> files;            ///< of tensors; small ones beside them are not listed
  std::vector<std::string> warnings;  ///< data that may be missing in the source unnoticed
};

struct ConsolidateReport {
  fs::path source;  ///< the checkpoint or directory that was read
  /// What that is: "tessera checkpoint", "Hugging Face model", "PyTorch DCP", "Lightning FSDP
  /// (PyTorch DCP)", "PyTorch DCP as safetensors".
  std::string kind;
  std::vector<SkippedEntry> skipped;
  std::optional<std::int64_t> step;  ///< of the checkpoint
  std::vector<std::string> files;    ///< in `out`
  std::int64_t tensors = 0;
  std::int64_t parameters = 0;    ///< elements of the model, if it was written
  std::int64_t bytes = 0;         ///< of tensor data written
  std::int64_t reused_bytes = 0;  ///< of output files, that an earlier call had written
  double seconds = 0;
};

/// The progress callback stopped a consolidation; see consolidate() for continuing it.
class ConsolidationStopped : public Error {
 public:
  template <typename... Args>
  explicit ConsolidationStopped(fmt::format_string<Args...> text, Args&&... args)
      : Error(fmt::format(text, std::forward<Args>(args)...)) {}
};

/// Writes a checkpoint's shards as a whole model. Sources: a checkpoint of tessera, a Hugging Face
/// directory, or a PyTorch Distributed Checkpoint of FSDP, torchtitan or Lightning; the files of
/// the directory decide. open_consolidate_source finds names and configuration.
///
/// Buffers take at most `memory` bytes together, whatever the model's size; names and places of
/// tensors take about 2 KiB each in addition. Checksums are verified on the way. Files are written
/// into `<out>.tmp`, synced, and renamed: `out` is complete, or absent, or still the former export.
/// io/FORMAT.md lists the files of both formats.
///
/// A call that was stopped or killed, or that an IoError ended, leaves `<out>.tmp` and
/// `<out>.tmp.journal`; a call that would write the same continues at the first unfinished file,
/// after it has read the finished ones back. Another call begins anew. Other errors remove both.
/// @throws InvalidArgument if `out` exists and may not be replaced, the source lies in or around
///         `out` or `<out>.tmp`, another process is writing there, or the options do not fit;
///         ConsolidationStopped, IoError, CorruptCheckpoint
ConsolidateReport consolidate(const fs::path& source, const fs::path& out,
                              const ConsolidateOptions& options = {});

/// Plans consolidate(). Reads metadata only, and writes nothing. @throws as consolidate()
ConsolidatePlan plan_consolidation(const fs::path& source, const ConsolidateOptions& options = {});

/// Plans an export to `out`, with all checks that consolidate() makes before it writes.
ConsolidatePlan plan_consolidation(const fs::path& source, const fs::path& out,
                                   const ConsolidateOptions& options = {});

}  // namespace tessera::io
