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

/// HF: a Hugging Face model directory. Safetensors: tensors alone, by tessera's names.
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
  std::optional<DType> dtype;  ///< F32 or BF16, for weights; empty: the stored dtype
  std::int64_t max_shard_size = 5'000'000'000;    ///< bytes of tensors in one file
  std::int64_t memory = std::int64_t{256} << 20;  ///< bytes of all buffers together
  std::optional<std::int64_t> step;               ///< of a run; empty: the newest committed one
  int jobs = 1;                                   ///< copying threads
  bool overwrite = false;                         ///< replace an earlier export at `out`
  /// For names in other programs' sharded checkpoints, except Hugging Face directories. Default
  /// rules adapt to the model in config.json: see open_consolidate_source.
  NameRules names;
  /// Patterns (see is_chosen) of the tensors to export, by tessera's names or those that `names`
  /// yields; moments follow their weight. Empty: all.
  std::vector<std::string> tensors;
  std::optional<fs::path> config_file;  ///< Hugging Face config.json, if not in the source
  /// Expected number of shards of a PyTorch DCP as safetensors, which does not record it.
  std::optional<std::int64_t> shards;
  /// Bypass the page cache where the file system allows; false: keep the output cached, for a
  /// program that reads it next.
  bool direct_io = true;
  /// Called every few MiB; calls are serialized. False stops with ConsolidationStopped.
  std::function<bool(const ConsolidateProgress&)> progress;
  /// Called with each warning before the first write: those of ConsolidatePlan, and the removal of
  /// an unfinished export.
  std::function<void(const std::string&)> warn;
};

/// An entry of a source that is not exported.
struct SkippedEntry {
  std::string name;  ///< at the source
  std::string why;   ///< "optimizer state, written with --what all", "not a tensor", ...
};

/// Output of a consolidation, before it is written.
struct ConsolidatePlan {
  struct Tensor {
    std::string source_name, name, file;
    Shape shape;
    DType stored = DType::F32, written = DType::F32;
    std::int64_t bytes = 0;  ///< as written
    /// safetensors name of a dtype that tessera lacks and copies unchanged; stored and written are
    /// then the integer of that size.
    std::string opaque_dtype;
  };
  struct File {
    std::string name;
    std::int64_t bytes = 0;
  };
  fs::path source;
  std::string kind;             ///< as in ConsolidateReport
  std::vector<Tensor> tensors;  ///< in order of writing
  std::vector<SkippedEntry> skipped;
  std::vector<File> files;            ///< of tensors only
  std::vector<std::string> warnings;  ///< about data that may be missing in the source
};

struct ConsolidateReport {
  fs::path source;  ///< the checkpoint or directory that was read
  /// "tessera checkpoint", "Hugging Face model", "PyTorch DCP", "Lightning FSDP (PyTorch DCP)" or
  /// "PyTorch DCP as safetensors".
  std::string kind;
  std::vector<SkippedEntry> skipped;
  std::optional<std::int64_t> step;  ///< of the checkpoint
  std::vector<std::string> files;    ///< in `out`
  std::int64_t tensors = 0;
  std::int64_t parameters = 0;    ///< elements of the model, if it was written
  std::int64_t bytes = 0;         ///< of tensor data written
  std::int64_t reused_bytes = 0;  ///< of output files written by an earlier call
  double seconds = 0;
};

/// Thrown if the progress callback stops a consolidation; the same consolidate() continues it.
class ConsolidationStopped : public Error {
 public:
  template <typename... Args>
  explicit ConsolidationStopped(fmt::format_string<Args...> text, Args&&... args)
      : Error(fmt::format(text, std::forward<Args>(args)...)) {}
};

/// Writes the shards of a checkpoint as a whole model. Sources, recognized by their files: a
/// checkpoint of tessera, a Hugging Face directory, or a PyTorch Distributed Checkpoint of FSDP,
/// torchtitan or Lightning. open_consolidate_source finds names and configuration.
///
/// Buffers take at most `memory` bytes, metadata about 2 KiB per tensor in addition. Verifies
/// checksums. Writes into `<out>.tmp`, syncs, and renames: `out` is complete, absent, or still the
/// former export. io/FORMAT.md lists the files of both formats.
///
/// A stopped or killed call, and an IoError, leave `<out>.tmp` and `<out>.tmp.journal`; a call with
/// the same output verifies the finished files and continues at the first unfinished one, another
/// call begins anew. Other errors remove both.
/// @throws InvalidArgument if `out` exists and may not be replaced, the source is inside or around
///         `out` or `<out>.tmp`, another process is writing there, or on invalid options;
///         ConsolidationStopped, IoError, CorruptCheckpoint
ConsolidateReport consolidate(const fs::path& source, const fs::path& out,
                              const ConsolidateOptions& options = {});

/// Plans consolidate(). Reads metadata only. @throws as consolidate()
ConsolidatePlan plan_consolidation(const fs::path& source, const ConsolidateOptions& options = {});

/// Plans an export to `out`, with all checks that precede the first write of consolidate().
ConsolidatePlan plan_consolidation(const fs::path& source, const fs::path& out,
                                   const ConsolidateOptions& options = {});

}  // namespace tessera::io
