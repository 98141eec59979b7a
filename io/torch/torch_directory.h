#pragma once

#include <memory>
#include <string>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a directory has pytorch_model.bin or its index, or accelerate's pytorch_model_fsdp.bin.
bool is_torch_directory(const fs::path& dir);

/// Opens such a directory of a Hugging Face model, or of accelerate. The files are pickles, which are parsed and never
/// executed. @param moments  read accelerate's optimizer, too; else it is in left_out()
/// @throws InvalidArgument if accelerate saved several models; as read_saved_state; Unsupported on parts of tensors; CorruptCheckpoint if a
/// tensor is not in the file that the index names
std::unique_ptr<ShardedSource> open_torch_directory(const fs::path& dir, bool moments = true);

/// Opens one file of a directory. @param kind  see ShardedSource
std::unique_ptr<ShardedSource> open_torch_file(const fs::path& dir, const std::string& name,
                                               const std::string& kind);

}  // namespace tessera::io
