#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/base/shard_layout.h"
#include "io/checkpoint/reader.h"

namespace tessera::io {

struct ReshardOptions {
  int world_size = 1;                             ///< ranks of the checkpoint that is written
  std::int64_t memory = std::int64_t{256} << 20;  ///< bytes, for all buffers together
  int jobs = 1;                                   ///< threads that copy
  bool overwrite = false;                         ///< replace a committed checkpoint of this step
  std::int64_t chunk_bytes = 0;                   ///< as SaveRequest::chunk_bytes
  /// Called now and then, never by two threads at once: bytes of tensor data done and in all.
  std::function<void(std::int64_t done, std::int64_t total)> progress{};
};

struct ReshardReport {
  fs::path path;           ///< of the committed checkpoint
  std::int64_t bytes = 0;  ///< of its shards
  double seconds = 0;
  std::string digest;  ///< the source's and the result's; empty without a model section
};

/// Writes what a checkpoint holds as a run of another world size would have saved it: a shard per
/// rank, each with the parts that the rank would own. Step, run id and trainer section stay.
///
/// Each byte is read once and verified. The result is committed as a save is: written and synced in
/// `step-N.reshard-<host>-<pid>.tmp` (of which those whose process is gone are removed first), then
/// renamed; one of the same step, if it is to be replaced, is exchanged with it in one step.
///
/// @param checkpoints_dir  made if absent
/// @throws InvalidArgument if there is a checkpoint of this step and overwrite is not set, or on
///         options that do not fit; IoError; CorruptCheckpoint naming file, tensor and elements.
///         After an error nothing is left, and no checkpoint has changed.
ReshardReport reshard_checkpoint(const CheckpointReader& source, const fs::path& checkpoints_dir,
                                 const ReshardOptions& options);

/// Flat units of a run that trains the tensors of this index, in the order in which it shards them:
/// a unit per block and one for the rest. For an architecture that is not known here, which tensors
/// make a block follows from their names and their order from the alphabet; any run can load the
/// outcome, only that it would itself have cut elsewhere.
std::vector<ShardLayout> shard_layouts(const CheckpointIndex& index, int world_size);

}  // namespace tessera::io
