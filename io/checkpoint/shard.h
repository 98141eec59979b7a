#pragma once

#include <memory>
#include <string>

#include "io/base/json.h"
#include "io/checkpoint/save.h"
#include "io/safetensors/writer.h"

namespace tessera::io {

/// "rank-00000-of-00004.safetensors"
std::string shard_name(int rank, int world_size);

/// Lays out a shard of tensors "SECTION/NAME".
SafetensorsPlan plan_shard_file(const std::vector<SafetensorsSpec>& tensors, std::int64_t step,
                                const std::string& run_id, int rank, int world_size);

/// Largest chunk in bytes, a power of two, of a checkpoint of `total` bytes. Reading a part of a
/// chunk reads all of it for the checksum, but more chunks make a larger index. 256 KiB; above 4
/// GiB as much as keeps the count near 16,384, up to 16 MiB; above 2 TiB as much as keeps it near
/// 131,072, for an index of 50 MB.
/// @param wanted  returned if not 0
/// @throws InvalidArgument unless `wanted` is 0 or a power of two >= 8
std::int64_t chunk_bytes_of(std::int64_t total, std::int64_t wanted);

/// Layout of a rank's shard.
struct ShardPlan {
  struct Entry {
    Section section = Section::Model;
    const TensorPart* part = nullptr;  ///< of the request
    std::int64_t begin = 0, end = 0;   ///< bytes in the file
  };
  std::string preamble;                  ///< bytes of the file before its data
  std::vector<Entry> entries;            ///< in file order
  std::shared_ptr<const Json> sections;  ///< the rank's part of the index, without chunks
  std::int64_t file_bytes = 0;
  /// Estimate for the rank's tensors in its part of the index plus the merged index.
  std::int64_t index_bytes = 0;
};

/// @throws InvalidArgument on an invalid or repeated part
ShardPlan plan_shard(const SaveRequest& request);

/// Writes this rank's shard into `dir`, in chunks of at most `chunk_bytes`, and syncs file and
/// directory.
/// @return JSON of the rank's part of the index: {"size": bytes, "header": {size, checksum},
///         "sections": {"model": {NAME: {dtype, shape, chunks}}, "optimizer/exp_avg": ...,
///         "optimizer/exp_avg_sq": ...}}
/// @throws IoError
std::string write_shard(const SaveRequest& request, const ShardPlan& plan, std::int64_t chunk_bytes,
                        const fs::path& dir);

}  // namespace tessera::io
