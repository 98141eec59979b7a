#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/base/file.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Whether a directory is of adapters in PEFT's format. A training checkpoint may have an
/// adapter_config.json beside its own files, and is none.
bool is_adapter_directory(const fs::path& dir);
/// Whether a path is what open_foreign() opens.
bool is_foreign(const fs::path& path);
/// The tensors of other programs' files, under their names in them: what open_sharded() opens, a
/// GGUF file, or adapters in PEFT's format. @throws as the open functions of each form
std::unique_ptr<TensorSource> open_foreign(const fs::path& path);

/// The folder of a run that open_foreign() reads: Megatron's newest iteration, or the one that
/// DeepSpeed's `latest` names; else the path.
fs::path folder_of_run(const fs::path& path);

/// A checkpoint or model of another program.
struct FoundCheckpoint {
  fs::path path;     ///< directory or file
  std::string kind;  ///< as ShardedSource::kind(), "GGUF file" or "LoRA adapters (PEFT)"
  std::optional<std::int64_t> step;  ///< by the names in its path: "step-20", "global_step20"
  std::string problem;               ///< why it cannot be read; empty if complete
  std::int64_t bytes = 0;            ///< of its files
  std::int64_t time = 0;             ///< Unix time of the last write
  bool newest = false;               ///< complete, and none has a higher step or, without, is newer
};

/// Lists what open_foreign() opens at a path and up to three levels below it, by
/// step and path. Judges by metadata: parts that are missing, truncated or of different saves are
/// problems. Leaves out hidden directories, links to directories, and files of torch.save that hold
/// no tensors or are part of a directory of the list.
/// @throws InvalidArgument above 10,000 directories; IoError if `path` cannot be read
std::vector<FoundCheckpoint> find_sharded(const fs::path& path);

}  // namespace tessera::io
