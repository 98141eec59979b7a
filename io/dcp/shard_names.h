#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/base/file.h"

namespace tessera::io {

/// Whether a file is taken for one of a Distributed Checkpoint in safetensors form.
bool is_dcp_shard_name(std::string_view name);

/// The files of such a checkpoint.
struct DcpShards {
  std::vector<std::string> names;     ///< by shard, then by model file
  std::vector<std::string> warnings;  ///< what may be missing without a trace, in sentences
};

/// Takes the files of a checkpoint from a list of names, and checks by their numbers that all are
/// there: shard-SSSSS-model-MMMMM-of-NNNNN.safetensors is what rank S - 1 saved of the M-th of the
/// model's N files. Each M up to N must be there of some rank, and each S up to the largest. No
/// name tells the largest S that was saved.
///
/// @param dir     named in errors
/// @param shards  how many there must be. A rank that had nothing to save wrote no file; so this
///                may be the count of those that are there, though one before the last is not.
/// @throws CorruptCheckpoint naming the file that is missing or does not fit the others;
///         InvalidArgument if there are more than `shards`
DcpShards find_dcp_shards(const std::vector<std::string>& names, const fs::path& dir,
                          std::optional<std::int64_t> shards = {});

}  // namespace tessera::io
