#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a directory is a PyTorch Distributed Checkpoint (`.metadata`, or `.distcp` files without
/// it), as saved by FSDP, torchtitan and Lightning; or is_accelerate().
bool is_dcp(const fs::path& dir);
/// Whether a directory has accelerate's folders of two such checkpoints, for model and optimizer.
bool is_accelerate(const fs::path& dir);
/// Opens a Distributed Checkpoint. Reads `.metadata` and checks that all files exist and are long
/// enough. Reads the directory of a chunk's archive on first use. Verifies data against the CRC-32
/// in the archive if there is one; PyTorch may omit it.
/// @throws CorruptCheckpoint, Unsupported as parse_dcp_metadata; IoError
std::unique_ptr<ShardedSource> open_dcp(const fs::path& dir);

/// Whether a directory is a Distributed Checkpoint in safetensors form: files
/// `shard-...safetensors`, without model.safetensors or its index.
bool is_dcp_safetensors(const fs::path& dir);
/// Opens the safetensors form. It has no checksums and no shapes, so a tensor ends where its last
/// chunk ends. A missing shard is detected from the numbers of the others (see find_dcp_shards) or
/// as a hole in a tensor, or, if it is the last one, from vectors that are shorter than the rows of
/// all matrices; loss_warnings() lists losses that no check detects.
/// @param shards  expected number of shards, if known
/// @throws CorruptCheckpoint naming file and tensor; InvalidArgument if there are more than
///         `shards`; IoError
std::unique_ptr<ShardedSource> open_dcp_safetensors(const fs::path& dir,
                                                    std::optional<std::int64_t> shards = {});

}  // namespace tessera::io
