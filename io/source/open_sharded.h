#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether open_sharded would open a directory, by the names of its files.
bool is_sharded(const fs::path& dir);

/// @throws InvalidArgument, with advice, if subdirectories are Distributed Checkpoints, or the
///         directory has pytorch_model.bin
void refuse_parent_of_shards(const fs::path& dir);

/// Opens another program's tensors, recognized by the files of the directory: a Hugging Face model,
/// a PyTorch Distributed Checkpoint (FSDP, torchtitan, Lightning) or its safetensors form.
/// @param shards  expected number of shards; only for the safetensors form, which lacks it
/// @return null if it is none of these
/// @throws InvalidArgument as refuse_parent_of_shards, and if `shards` is given for another form;
///         errors of the open functions of each form
std::unique_ptr<ShardedSource> open_sharded(const fs::path& dir,
                                            std::optional<std::int64_t> shards = {});

}  // namespace tessera::io
