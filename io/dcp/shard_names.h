#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/base/file.h"

namespace tessera::io {

/// Whether a name is that of a Distributed Checkpoint in safetensors form.
bool is_dcp_shard_name(std::string_view name);

/// The files of such a checkpoint.
struct DcpShards {
  std::vector<std::string> names;     ///< by shard, then by model file
  std::vector<std::string> warnings;  ///< shards that may be missing unnoticed
};

/// Picks the files of a checkpoint from a list of names, and checks by their numbers that none is
/// missing: shard-SSSSS-model-MMMMM-of-NNNNN.safetensors holds rank S - 1's part of the M-th of the
/// model's N files. Each M up to N must exist for some rank, and each S up to the largest. No name
/// records the number of ranks.
///
/// @param dir     named in errors
/// @param shards  expected number. A rank with nothing to save writes no file, so this may equal
/// the
///                number of files although one before the last is missing.
/// @throws CorruptCheckpoint naming the file that is missing or does not fit the others;
///         InvalidArgument if there are more than `shards`
DcpShards find_dcp_shards(const std::vector<std::string>& names, const fs::path& dir,
                          std::optional<std::int64_t> shards = {});

}  // namespace tessera::io
