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
#include "io/checkpoint/reader.h"
#include "io/pump/layout.h"
#include "io/source/names.h"

namespace tessera::io {

/// HF: a Hugging Face model directory. Safetensors: tensors only, under tessera's names. GGUF: one
/// file with settings and tokenizer, of the families that llama.cpp has. DCP: a PyTorch Distributed
/// Checkpoint. Bin: a Hugging Face directory with files of torch.save.
enum class ExportFormat { HF, Safetensors, GGUF, DCP, Bin };
enum class ExportWhat { Model, Optimizer, All };

/// Progress in bytes of output files.
struct ConsolidateProgress {
  std::int64_t done = 0;
  std::int64_t total = 0;
  std::int64_t reused = 0;  ///< bytes of `done` that an earlier call wrote
};

/// A part of an export that several processes write, from 1 to `count`.
struct ExportShare {
  int number = 1, count = 1;
};

struct ConsolidateOptions {
  ExportFormat format = ExportFormat::HF;
  ExportWhat what = ExportWhat::Model;
  WeightKind weights = WeightKind::Trained;  ///< of a checkpoint of tessera
  std::optional<DType> dtype;                ///< of weights, F32, BF16 or F16; empty: as stored
  /// Q8_0: of matrices in GGUF whose rows are multiples of 32; others become F16. Without dtype.
  Encoding encoding = Encoding::Plain;
  std::int64_t max_shard_size = 5'000'000'000;  ///< bytes of tensors in one file
  std::int64_t memory = std::int64_t{256}
                        << 20;       ///< total bytes of all buffers, from kLeastJobMemory
  std::optional<std::int64_t> step;  ///< of a run; empty: its newest checkpoint
  int jobs = 1;                      ///< copying threads
  bool overwrite = false;            ///< replace an earlier export at `out`
  std::optional<ExportShare> part;   ///< write only this part; see consolidate()
  /// Rules for names in other programs' checkpoints; see open_consolidate_source.
  NameRules names;
  /// List tensors that are not the model's, too, and accept missing ones: for comparisons.
  bool partial = false;
  /// Patterns (see is_chosen) that select tensors to export by the names in the output. Moments are
  /// selected with their weight. Empty: exports all.
  std::vector<std::string> tensors;
  /// Write the weights of a base with LoRA adapters merged into them, not the adapters alone.
  bool merge_lora = false;
  /// MODEL of the frozen weights of adapters; empty: the one that they name.
  fs::path base;
  /// Hugging Face config.json, if not in the source, and of one's own models.
  std::optional<fs::path> config_file;
  /// Hugging Face directory with tensors of the same names and shapes as the model to export, and,
  /// without config_file, its config.json. Not for checkpoints of tessera.
  std::optional<fs::path> like;
  /// Expected number of shards of a PyTorch DCP as safetensors, which does not record it.
  std::optional<std::int64_t> shards;
  /// Bypass the page cache if the file system allows it. Set false to keep the output cached for a
  /// program that reads it next.
  bool direct_io = true;
  /// Called every few MiB; calls are serialized. Returning false throws ConsolidationStopped.
  std::function<bool(const ConsolidateProgress&)> progress;
  /// Called with the bytes read and the total while files with a seal are compared with it, before
  /// the first write. Calls are serialized.
  std::function<void(std::int64_t done, std::int64_t total)> checked;
  /// Called with each warning before the first write: the warnings of ConsolidatePlan, and one if
  /// an unfinished export is removed.
  std::function<void(const std::string&)> warn;
};

/// An entry of a source that is not exported.
struct SkippedEntry {
  std::string name;  ///< name at the source
  std::string why;   ///< "optimizer state, written with --what all", "not a tensor", ...
};

/// The tensors and files that a consolidation with these options writes.
struct ConsolidatePlan {
  struct Tensor {
    std::string source_name, name, file;
    Shape shape;
    DType stored = DType::F32, written = DType::F32;
    std::int64_t bytes = 0;  ///< size in the output
    /// safetensors name of a dtype that tessera lacks and copies unchanged; `stored` and `written`
    /// are then the integer dtype of the same size. Else empty.
    std::string opaque_dtype;
    Encoding encoding = Encoding::Plain;  ///< of `written`
  };
  struct File {
    std::string name;
    std::int64_t bytes = 0;
  };
  fs::path source;
  std::string kind;             ///< as in ConsolidateReport
  std::vector<Tensor> tensors;  ///< in order of writing
  std::vector<SkippedEntry> skipped;
  std::vector<File> files;            ///< files with tensors only
  std::vector<std::string> warnings;  ///< about data that may be missing in the source
};

struct ConsolidateReport {
  fs::path source;  ///< the checkpoint or directory that was read
  /// "tessera checkpoint", "Hugging Face model", "PyTorch DCP", "Lightning FSDP (PyTorch DCP)" or
  /// "PyTorch DCP as safetensors".
  std::string kind;
  std::vector<SkippedEntry> skipped;
  std::optional<std::int64_t> step;  ///< step of the checkpoint
  std::vector<std::string> files;    ///< names of the files in `out`, or of those of the part
  bool committed = true;             ///< whether `out` is complete: false for all parts but one
  std::vector<int> waiting;          ///< parts that are not done, if not committed
  std::int64_t tensors = 0;
  std::int64_t parameters = 0;    ///< elements of the exported weights
  std::int64_t bytes = 0;         ///< tensor data in the output
  std::int64_t reused_bytes = 0;  ///< output files that an earlier call wrote
  double seconds = 0;
};

/// Thrown if the progress callback stops a consolidation. The same call of consolidate() continues.
class ConsolidationStopped : public Error {
 public:
  using Error::Error;
};

/// Writes the shards of a checkpoint as a whole model. The source, recognized by its files, is a
/// checkpoint of tessera, a Hugging Face directory, or a PyTorch Distributed Checkpoint of FSDP,
/// torchtitan or Lightning. See open_consolidate_source for names and configuration.
///
/// Buffers take at most `memory` bytes, and metadata about 3 KiB per tensor. Verifies checksums,
/// and first the seal of another program's files, if they have one (see write_seal).
/// Writes into `<out>.tmp`, syncs it and renames it, so that `out` is always complete, absent, or
/// the former export. io/FORMAT.md lists the files of both formats.
///
/// A stopped or killed call, or an IoError, leaves `<out>.tmp` and `<out>.tmp.journal`. If a later
/// call would write the same output, it verifies the finished files and continues; otherwise it
/// begins anew. Other errors remove both.
/// With `part`, processes that share only the parent directory of `out` write the files of one part
/// each, beside `out`. The call that finds all parts done commits. A part may be repeated, also
/// after a kill; parts of other options or of another source are an error.
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
