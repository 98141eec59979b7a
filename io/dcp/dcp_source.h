#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "io/source/sharded_source.h"

namespace tessera::io {

/// Whether a directory holds a PyTorch Distributed Checkpoint (`.metadata`, or `.distcp` files that
/// lack it), as FSDP, torchtitan and Lightning save it.
bool is_dcp(const fs::path& dir);
/// Opens one. Reads `.metadata` and looks whether all files are there and long enough. Each chunk's
/// archive is read when its data is first asked for, and its data verified against the checksum
/// that the archive has (PyTorch may leave it out) before a byte of it reaches the caller, or as
/// `stream` goes.
/// @throws CorruptCheckpoint, Unsupported as parse_dcp_metadata; IoError
std::unique_ptr<ShardedSource> open_dcp(const fs::path& dir);

/// Whether a directory holds a Distributed Checkpoint in safetensors form: files
/// `shard-...safetensors`, and no model.safetensors or index of one.
bool is_dcp_safetensors(const fs::path& dir);
/// Opens one. Nothing in this form says how large a tensor is: it ends where its last chunk does.
/// A shard that is missing is noticed by the numbers of the others (see find_dcp_shards) or a hole
/// in a tensor; warnings() says what is noticed by neither. There are no checksums.
/// @param shards  how many there must be, if that is known
/// @throws CorruptCheckpoint naming file and tensor; InvalidArgument if there are more than
///         `shards`; IoError
std::unique_ptr<ShardedSource> open_dcp_safetensors(const fs::path& dir,
                                                    std::optional<std::int64_t> shards = {});

}  // namespace tessera::io
