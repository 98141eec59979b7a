#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/base/file.h"
#include "io/checkpoint/index.h"

namespace tessera::io {

/// The part of a tensor that a rank owns: elements [begin, end) of the whole tensor in row-major
/// order. `data` points to element `begin` and must stay unchanged until save_checkpoint returns.
/// begin == end only declares the tensor; tensors without elements must be declared.
struct TensorPart {
  std::string name;
  Shape shape;  ///< of the whole tensor
  DType dtype = DType::F32;
  std::int64_t begin = 0, end = 0;
  const void* data = nullptr;
};

/// Request of one rank. Step, world size and run id must be equal on all ranks.
struct SaveRequest {
  /// Created if absent. Used by one run at a time: attempts of other runs are removed.
  fs::path checkpoints_dir;
  std::int64_t step = 0;  ///< updates made so far
  int rank = 0;
  int world_size = 1;
  std::string run_id;  ///< letters, digits, '.', '_', '-'
  std::vector<TensorPart> model;
  std::vector<TensorPart> exp_avg, exp_avg_sq;  ///< empty on all ranks: weights only
  std::string model_config = "{}";  ///< JSON of the configuration's "model" section; from rank 0
  /// Replicated state, written by the rank with the smallest shard (ties: the last) among those
  /// that pass it. Empty on all ranks: no trainer section.
  std::string trainer_json;
  /// Largest index; readers accept kMaxIndexBytes.
  std::int64_t max_index_bytes = kMaxIndexBytes;
  /// Largest chunk in bytes, a power of two >= 8; 0: chosen by chunk_bytes_of().
  std::int64_t chunk_bytes = 0;
  /// Called at each labelled point, for fault injection.
  std::function<void(std::string_view point)> at_point;
  /// Incremented as this rank makes progress, so that a watchdog can detect a hang; may be null.
  std::shared_ptr<std::atomic<std::uint64_t>> pulse;
  /// Set to cut the removal of old checkpoints short; may be null.
  std::shared_ptr<std::atomic<bool>> hurry;
  /// Bytes free on the file system of a directory, -1 if unknown; replaced for fault injection.
  std::function<std::int64_t(const fs::path& dir)> free_bytes = io::free_bytes;
};

/// Exchange of messages between the ranks of a save.
class SaveCoordinator {
 public:
  virtual ~SaveCoordinator() = default;
  /// Gathers `mine` (a few KiB at most) of all ranks; returns them by rank. `phase` is the same on
  /// all ranks and contains the step; it repeats if a step is saved again.
  /// @throws CommError naming the ranks that did not answer in time
  virtual std::vector<std::string> exchange(const std::string& phase, std::string_view mine) = 0;
};

struct SaveReport {
  fs::path path;                 ///< the committed checkpoint
  std::int64_t bytes = 0;        ///< of this rank's shard
  std::int64_t total_bytes = 0;  ///< of all ranks' shards
  double seconds = 0;            ///< from call to commit
};

/// Saves a checkpoint of all ranks; collective over the coordinator, which carries no weights.
/// 1. Ranks exchange their sizes and check the free space. 2. Each rank writes its shard and its
/// part of the index into `step-N.<run id>.tmp/` and syncs them. 3. Rank 0 merges the parts into
/// the index and commits by one rename. Replaces a committed checkpoint of the same step in that
/// rename, after each rank has read its new shard back.
///
/// Does not copy the data.
/// @throws IoError, the same on all ranks, naming rank, file and cause; CommError from the
///         coordinator. The attempt is then removed; other checkpoints are unchanged.
SaveReport save_checkpoint(const SaveRequest& request, SaveCoordinator& coordinator);

}  // namespace tessera::io
