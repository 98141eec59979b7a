#pragma once

#include <string>

#include "io/checkpoint/save.h"

namespace tessera::io {

/// "rank-00000-of-00004.safetensors"
std::string shard_name(int rank, int world_size);

/// Writes this rank's shard into `dir` and syncs file and directory.
/// @return the rank's part of the index: {"size": bytes, "header": {size, checksum}, "sections":
///         {"model": {NAME: {dtype, shape, chunks}}, "optimizer/exp_avg": ...,
///         "optimizer/exp_avg_sq": ...}}
/// @throws InvalidArgument on parts that do not fit, IoError
Json write_shard(const SaveRequest& request, const fs::path& dir);

}  // namespace tessera::io
