#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/base/file.h"

namespace tessera::io {

/// Whether a file of this name belongs to a Distributed Checkpoint in safetensors form.
bool is_dcp_shard_name(std::string_view name);

/// Files of a Distributed Checkpoint in safetensors form.
struct DcpShards {
  std::vector<std::string> names;     ///< by shard, then by model file
  std::size_t count = 0;              ///< number of shards
  std::vector<std::string> warnings;  ///< about shards whose loss cannot be detected
};

/// Selects the files of a checkpoint from a list of names, and detects missing ones by their
/// numbers: shard-SSSSS-model-MMMMM-of-NNNNN.safetensors is the part of rank S - 1 in file M of N
/// of the model. Each M from 1 to N must exist for some rank, and each S from 1 to the largest for
/// some M. No name records the number of ranks.
///
/// @param dir     named in errors
/// @param shards  expected number of shards with files; allows gaps in the numbers, since a rank
///                with nothing to save writes no file
/// @throws CorruptCheckpoint naming the file that is missing or contradicts the others;
///         InvalidArgument if there are more than `shards`
DcpShards find_dcp_shards(const std::vector<std::string>& names, const fs::path& dir,
                          std::optional<std::int64_t> shards = {});

}  // namespace tessera::io
