#pragma once

#include <memory>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a directory holds tensors as Hugging Face does: model.safetensors, or
/// model.safetensors.index.json and the files that it lists.
bool is_safetensors_directory(const fs::path& dir);

/// Opens one, by the names that its files have. Reads every header. There are no checksums.
/// @throws CorruptCheckpoint naming the file, also if a tensor is not where the index has it;
///         IoError
std::unique_ptr<ShardedSource> open_safetensors_directory(const fs::path& dir);

}  // namespace tessera::io
