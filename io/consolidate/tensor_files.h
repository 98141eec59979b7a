#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "io/base/file.h"
#include "io/checkpoint/reader.h"

namespace tessera::io {

/// A tensor on its way into an export.
struct ExportTensor {
  std::string name;  ///< in the output
  Shape shape;
  DType stored = DType::F32;   ///< dtype at the source
  DType written = DType::F32;  ///< dtype in the output
  /// Passes the whole tensor, in order and in its stored dtype, through a buffer of this many
  /// bytes.
  std::function<void(std::size_t buffer_bytes, const CheckpointReader::Sink&)> stream;
};

struct TensorFilesOptions {
  std::string stem = "model";                               ///< STEM.safetensors
  std::int64_t max_shard_size = 5'000'000'000;              ///< bytes of tensors in one file
  std::int64_t memory = std::int64_t{256} << 20;            ///< bytes of all buffers together
  int jobs = 1;                                             ///< threads that copy
  std::map<std::string, std::string> metadata;              ///< of each file
  std::function<void(std::int64_t bytes)> wrote = nullptr;  ///< called from one thread at a time
};

/// Writes tensors into `dir` as STEM.safetensors or, if they are larger than max_shard_size, as
/// STEM-00001-of-0000N.safetensors and STEM.safetensors.index.json in the manner of Hugging Face:
/// filled greedily in order of names, a tensor that is larger alone. Files are synced. Fewer
/// threads copy than `jobs` where `memory` gives each less than 64 KiB (its least buffer) or the
/// system starts no more.
/// @param tensors  at least one
/// @return names of the files written
/// @throws IoError, and what the streams throw
std::vector<std::string> write_tensor_files(const fs::path& dir,
                                            const std::vector<ExportTensor>& tensors,
                                            const TensorFilesOptions& options);

}  // namespace tessera::io
