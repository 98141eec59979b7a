#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether open_sharded would open a directory: told by the names of its files.
bool is_sharded(const fs::path& dir);

/// @throws InvalidArgument that names one if folders of this one are Distributed Checkpoints
void refuse_parent_of_shards(const fs::path& dir);

/// Opens somebody else's tensors, if a directory holds such, told by its files: a Hugging Face
/// model, a PyTorch Distributed Checkpoint (FSDP, torchtitan, Lightning) or its safetensors form.
/// @param shards  how many there must be; for the safetensors form alone, which does not say it
/// @return null if it is none of these
/// @throws InvalidArgument naming them if its folders are Distributed Checkpoints, but not it
///         itself, and if `shards` is given for another form; as the open functions of each
std::unique_ptr<ShardedSource> open_sharded(const fs::path& dir,
                                            std::optional<std::int64_t> shards = {});

}  // namespace tessera::io
