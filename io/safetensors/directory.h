#pragma once

#include <memory>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a directory has model.safetensors or model.safetensors.index.json, as Hugging Face's do.
bool is_safetensors_directory(const fs::path& dir);

/// Opens one, with the names of its files. Reads every header. There are no checksums.
/// @throws CorruptCheckpoint naming the file, also if a tensor is not in the file that the index
///         names; IoError
std::unique_ptr<ShardedSource> open_safetensors_directory(const fs::path& dir);

}  // namespace tessera::io
