#pragma once

#include <map>
#include <string>

#include "io/checkpoint/save.h"
#include "io/safetensors/writer.h"

namespace tessera::io {

/// "rank-00000-of-00004.safetensors"
std::string shard_name(int rank, int world_size);

/// Lays out a shard. Tensors are named "SECTION/NAME".
SafetensorsPlan plan_shard_file(const std::vector<SafetensorsSpec>& tensors, std::int64_t step,
                                const std::string& run_id, int rank, int world_size);

/// Maximum size of a chunk, a power of two, for a checkpoint of `total` bytes. Small chunks make
/// partial reads cheap, because a chunk is read whole for its checksum; large ones make the index
/// small. 256 KiB up to 4 GiB in total; then about 16,384 chunks, until these have 16 MiB; above
/// 2 TiB about 131,072 chunks, for an index of 50 MB.
/// @param wanted  returned if not 0
/// @throws InvalidArgument unless `wanted` is 0 or a power of two >= 8
std::int64_t chunk_bytes_of(std::int64_t total, std::int64_t wanted);

struct ShardPlan {
  struct Entry {
    Section section;
    const TensorPart* part = nullptr;  ///< in the request
    std::int64_t begin = 0;            ///< first byte in the file
  };
  std::string preamble;                  ///< bytes of the file before its data
  std::vector<Entry> entries;            ///< in file order
  std::map<Section, TensorMap> tensors;  ///< for the rank's part of the index; no chunks yet
  std::int64_t file_bytes = 0;
  /// Estimated bytes of the rank's tensors in its part of the index and in the merged index.
  std::int64_t index_bytes = 0;
};

/// @throws InvalidArgument on an invalid or repeated part
ShardPlan plan_shard(const SaveRequest& request);

/// Writes this rank's shard into `dir`, in chunks of at most `chunk_bytes`, and syncs file and
/// directory.
/// @return JSON of the rank's part of the index: {"size": bytes, "header": {size, checksum},
///         "sections": {"model": {NAME: {dtype, shape, chunks}}, "optimizer/STATE": ...}}
/// @throws IoError
std::string write_shard(const SaveRequest& request, const ShardPlan& plan, std::int64_t chunk_bytes,
                        const fs::path& dir);

}  // namespace tessera::io
