#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/base/shard_layout.h"
#include "io/checkpoint/reader.h"

namespace tessera::io {

/// A training state to reshard.
struct ReshardSource {
  static constexpr const char* kImport = "import";  ///< run id of what is of other programs

  // NOLINTNEXTLINE(google-explicit-constructor): a checkpoint of tessera is one
  ReshardSource(const CheckpointReader& reader);
  /// @param tensors  by section; outlive this
  ReshardSource(fs::path path, std::string model_config, std::int64_t step,
                const std::map<Section, const TensorSource*>& tensors);

  fs::path path;
  CheckpointIndex index;  ///< tensors without chunks if it is no checkpoint of tessera
  std::map<Section, const TensorSource*> tensors;
  std::string trainer_json;  ///< empty without a trainer section
};

struct ReshardOptions {
  int world_size = 1;                             ///< ranks of the new checkpoint
  std::int64_t memory = std::int64_t{256} << 20;  ///< bytes of all buffers
  int jobs = 1;                                   ///< copying threads
  bool overwrite = false;                         ///< replace an existing checkpoint of this step
  std::int64_t chunk_bytes = 0;                   ///< as SaveRequest::chunk_bytes
  /// Tensors in the model's order of registration; empty: unknown, see shard_layouts.
  std::vector<TensorInfo> order{};
  /// Called with the bytes written and the total. Calls are serialized.
  std::function<void(std::int64_t done, std::int64_t total)> progress{};
};

struct ReshardReport {
  fs::path path;           ///< the new checkpoint
  std::int64_t bytes = 0;  ///< total size of its shards
  double seconds = 0;
  std::string digest;  ///< CheckpointReader::digest(); empty without a model section
};

/// Writes a checkpoint as a run of a world size would have saved it. Keeps step, run id and trainer
/// section.
///
/// Reads each byte once and verifies it. Removes attempts of ended processes first. Writes and
/// syncs `step-N.reshard-<host>-<pid>.tmp`, then commits by renaming it, or by swapping it with the
/// checkpoint that it replaces.
///
/// @param checkpoints_dir  created if absent
/// @throws InvalidArgument if a checkpoint of this step exists and overwrite is not set, or on
///         invalid options; IoError; CorruptCheckpoint naming file, tensor and elements. After an
///         error the attempt is removed, and no checkpoint has changed.
ReshardReport reshard_checkpoint(const ReshardSource& source, const fs::path& checkpoints_dir,
                                 const ReshardOptions& options);

/// Sharding units (by block) of a run that trains the tensors of this index: blocks, and the modules
/// outside of them, derived from the names. Tensors that `order` lacks, or has with another shape, follow
/// alphabetically. Any run can load the result, but would then itself shard at other boundaries.
std::vector<ShardLayout> shard_layouts(const CheckpointIndex& index, int world_size,
                                       const std::vector<TensorInfo>& order);

}  // namespace tessera::io
