#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a directory holds a PyTorch Distributed Checkpoint (`.metadata`, or `.distcp` files that
/// lack it), as FSDP, torchtitan and Lightning save it.
bool is_dcp(const fs::path& dir);
/// Opens one. Reads `.metadata` and checks that all files exist and are long enough. A chunk's
/// archive is opened on first use; its data is verified if the archive has a checksum (PyTorch may
/// omit it).
/// @throws CorruptCheckpoint, Unsupported as parse_dcp_metadata; IoError
std::unique_ptr<ShardedSource> open_dcp(const fs::path& dir);

/// Whether a directory holds a Distributed Checkpoint in safetensors form: files
/// `shard-...safetensors`, and no model.safetensors or index of one.
bool is_dcp_safetensors(const fs::path& dir);
/// Opens one. This form does not record a tensor's shape: the last chunk ends it. A missing shard
/// shows in the numbers of the others (see find_dcp_shards) or as a hole in a tensor; warnings()
/// lists losses that neither would show. There are no checksums.
/// @param shards  expected number of shards, if known
/// @throws CorruptCheckpoint naming file and tensor; InvalidArgument if there are more than
///         `shards`; IoError
std::unique_ptr<ShardedSource> open_dcp_safetensors(const fs::path& dir,
                                                    std::optional<std::int64_t> shards = {});

}  // namespace tessera::io
