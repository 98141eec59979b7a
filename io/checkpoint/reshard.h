#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/base/shard_layout.h"
#include "io/checkpoint/reader.h"

namespace tessera::io {

struct ReshardOptions {
  int world_size = 1;                             ///< ranks of the new checkpoint
  std::int64_t memory = std::int64_t{256} << 20;  ///< bytes, for all buffers together
  int jobs = 1;                                   ///< threads that copy
  bool overwrite = false;                         ///< replace a committed checkpoint of this step
  std::int64_t chunk_bytes = 0;                   ///< as SaveRequest::chunk_bytes
  /// Tensors in the order in which the model registers them; empty: unknown, see shard_layouts.
  std::vector<TensorInfo> order{};
  /// Called from one thread at a time: bytes of files done and in all.
  std::function<void(std::int64_t done, std::int64_t total)> progress{};
};

struct ReshardReport {
  fs::path path;           ///< of the committed checkpoint
  std::int64_t bytes = 0;  ///< of its shards
  double seconds = 0;
  std::string digest;  ///< the source's and the result's; empty without a model section
};

/// Writes a checkpoint as a run of another world size would have saved it: a shard per rank, with
/// the parts that the rank would own. Step, run id and trainer section stay.
///
/// Each byte is read once and verified. Commits as a save does: writes and syncs
/// `step-N.reshard-<host>-<pid>.tmp`, then renames it, or swaps it with the checkpoint that it
/// replaces. Attempts of processes that have ended are removed first.
///
/// @param checkpoints_dir  made if absent
/// @throws InvalidArgument if there is a checkpoint of this step and overwrite is not set, or on
///         options that do not fit; IoError; CorruptCheckpoint naming file, tensor and elements.
///         After an error nothing is left, and no checkpoint has changed.
ReshardReport reshard_checkpoint(const CheckpointReader& source, const fs::path& checkpoints_dir,
                                 const ReshardOptions& options);

/// Flat units of a run that trains the tensors of this index, in the order in which it shards them:
/// a unit per block and one for the rest, by names. Tensors that `order` lacks, or has in another
/// shape, follow in alphabetical order: any run can load the result, but would itself cut
/// elsewhere.
std::vector<ShardLayout> shard_layouts(const CheckpointIndex& index, int world_size,
                                       const std::vector<TensorInfo>& order);

}  // namespace tessera::io
