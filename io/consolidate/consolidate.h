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

/// Who copies bytes that need no conversion and have checksums.
enum class CopyBy {
  Auto,    ///< the system, if `out` is on a network file system, where the server may do it
  System,  ///< copy_file_range, where it works; the copy is read, and its checksums are verified
  Program  ///< reads, verifies and writes; on the file systems of local disks twice as fast
};

/// In bytes of output files.
struct ConsolidateProgress {
  std::int64_t done = 0;
  std::int64_t total = 0;
  std::int64_t reused = 0;  ///< of `done`: written by an earlier call that was stopped
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
  CopyBy copy = CopyBy::Auto;
  /// Called from one thread at a time after each few MiB. False stops: see ConsolidationStopped.
  std::function<bool(const ConsolidateProgress&)> progress;
  /// Called, before anything is written, with each sentence that whoever waits should read: what
  /// ConsolidatePlan::warnings holds, and that an unfinished export is thrown away.
  std::function<void(const std::string&)> warn;
};

/// A tensor, or something else, that is in a source and is not exported.
struct SkippedEntry {
  std::string name;  ///< at the source
  std::string why;   ///< "optimizer state, written with --what all", "no tensor", ...
};

/// What a consolidation would do.
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
  std::vector<std::string> warnings;  ///< what may be missing in the source and leaves no trace
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
  /// Of tensor data, that copy_file_range copied.
  std::int64_t system_copied_bytes = 0;
  double seconds = 0;
};

/// The progress callback stopped a consolidation. What was written is synced, and a call with the
/// same source, output and options goes on from there.
class ConsolidationStopped : public Error {
 public:
  template <typename... Args>
  explicit ConsolidationStopped(fmt::format_string<Args...> text, Args&&... args)
      : Error(fmt::format(text, std::forward<Args>(args)...)) {}
};

/// Makes a whole model of a checkpoint's shards, or of somebody else's: a Hugging Face directory,
/// or a PyTorch Distributed Checkpoint of FSDP, torchtitan or Lightning. Which it is, is told by
/// its files; see open_consolidate_source for names and configuration.
///
/// Gathers ranges of bytes in buffers of at most `memory` bytes together, whatever the model's
/// size (names and places of tensors take about 2 KiB each beside them), and verifies checksums as
/// it reads. Writes into `<out>.tmp` beside `out`, syncs, and renames: `out` is complete or absent
/// (or still the former export). HF: model.safetensors, or shards and model.safetensors.index.json,
/// config.json, generation_config.json, and the tokenizer: the files beside somebody else's
/// tensors, or, if the run's trainer.json has one, tokenizer_tessera.json with tokenizer.json and
/// tokenizer_config.json, which say the same to Hugging Face's programs. So, too, for models that
/// tessera does not know, whose config.json is copied but for its dtype, and whose tensors nothing
/// is compared with. Safetensors: our names; moments go to optimizer.safetensors as "exp_avg/NAME";
/// tessera.json holds step and model configuration.
///
/// A call that was stopped or killed, or that an IoError ended, leaves `<out>.tmp` and
/// `<out>.tmp.journal`, and one like it goes on from there: with the same checksums at the source
/// (or, where it has none, the same unchanged files), the same layout of the output, and so much
/// memory a job that the blocks are the same. It reads back what it finds and keeps only what is as
/// it was written. Another call begins anew. One that fails otherwise removes both.
/// @throws InvalidArgument if `out` exists and may not be replaced, the source lies in or around
///         `out` or `<out>.tmp`, another process is writing there, or the options do not fit;
///         ConsolidationStopped, IoError, CorruptCheckpoint
ConsolidateReport consolidate(const fs::path& source, const fs::path& out,
                              const ConsolidateOptions& options = {});

/// What consolidate() would write with these options, from where and under which names. Reads
/// metadata only, and writes nothing. @throws as consolidate()
ConsolidatePlan plan_consolidation(const fs::path& source, const ConsolidateOptions& options = {});

/// The same of an export to `out`, after all checks that consolidate() makes before it writes: of
/// `out`, and of what describes each chunk of the source.
ConsolidatePlan plan_consolidation(const fs::path& source, const fs::path& out,
                                   const ConsolidateOptions& options = {});

}  // namespace tessera::io
