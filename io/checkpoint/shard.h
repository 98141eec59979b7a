#pragma once

#include <memory>
#include <string>

#include "io/base/json.h"
#include "io/checkpoint/save.h"

namespace tessera::io {

/// "rank-00000-of-00004.safetensors"
std::string shard_name(int rank, int world_size);

/// Bytes of a chunk at most, in a checkpoint of `total` bytes: a power of two. Who wants a part of
/// a chunk reads all of it for its checksum; but the more chunks, the larger the index. 256 KiB,
/// and from 4 GiB on so much that there are about 16,384 chunks, but no more than 16 MiB; from 2
/// TiB on so much that there are about 131,072, for which the index takes 50 MB.
/// @param wanted  taken instead if it is not 0
/// @throws InvalidArgument unless that is a power of two from 8 on
std::int64_t chunk_bytes_of(std::int64_t total, std::int64_t wanted);

/// What a rank's shard will hold, and where.
struct ShardPlan {
  struct Entry {
    Section section = Section::Model;
    const TensorPart* part = nullptr;  ///< of the request
    std::int64_t begin = 0, end = 0;   ///< bytes in the file
  };
  std::string preamble;                  ///< of the file, all before its data
  std::vector<Entry> entries;            ///< in order of their bytes
  std::shared_ptr<const Json> sections;  ///< of the rank's part of the index, without chunks
  std::int64_t file_bytes = 0;
  /// About what the rank's part of the index takes, and again the index for it.
  std::int64_t index_bytes = 0;
};

/// @throws InvalidArgument on parts that do not fit
ShardPlan plan_shard(const SaveRequest& request);

/// Writes this rank's shard into `dir`, in chunks of at most `chunk_bytes`, and syncs file and
/// directory.
/// @return JSON of the rank's part of the index: {"size": bytes, "header": {size, checksum},
/// "sections":
///         {"model": {NAME: {dtype, shape, chunks}}, "optimizer/exp_avg": ...,
///         "optimizer/exp_avg_sq": ...}}
/// @throws IoError
std::string write_shard(const SaveRequest& request, const ShardPlan& plan, std::int64_t chunk_bytes,
                        const fs::path& dir);

}  // namespace tessera::io
