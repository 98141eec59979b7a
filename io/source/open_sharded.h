#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether open_sharded recognizes a file, or the files of a directory.
bool is_sharded(const fs::path& path);

/// @throws InvalidArgument, with advice, if subdirectories are Distributed Checkpoints
void refuse_parent_of_shards(const fs::path& dir);

/// Opens a directory of another program, recognized by its files: a Hugging Face model, a PyTorch
/// Distributed Checkpoint (FSDP, torchtitan, Lightning) or its safetensors form, FSDP's files of each
/// rank, a DeepSpeed run or checkpoint, or a Megatron-core run (see find_megatron); or a file of
/// torch.save (see is_saved_file).
/// @param shards   expected number of shards, which only the safetensors form does not record
/// @param moments  whether moments are needed; else DeepSpeed's are in left_out(), because each is of
///                 as many blocks as ranks
/// @return null for any other path
/// @throws InvalidArgument as refuse_parent_of_shards, and if `shards` is given for another form;
///         errors of the open functions of each form
std::unique_ptr<ShardedSource> open_sharded(const fs::path& path,
                                            std::optional<std::int64_t> shards = {},
                                            bool moments = true);

}  // namespace tessera::io
