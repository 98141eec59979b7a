#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/base/file.h"
#include "io/checkpoint/index.h"

namespace tessera::io {

/// The part of a tensor that a rank owns: elements [begin, end) of the whole tensor, or of a box of
/// it, in row-major order. `data` points to element `begin` and must stay unchanged until save_checkpoint returns.
/// With begin == end, a part only declares the tensor; an empty tensor must be declared too.
struct TensorPart {
  std::string name;
  Shape shape;  ///< of the whole tensor
  DType dtype = DType::F32;
  std::int64_t begin = 0, end = 0;
  const void* data = nullptr;
  std::optional<Box> box{};  ///< absent: the whole tensor
};

/// One rank's request for a save. Step, world size and run id must be equal on all ranks.
struct SaveRequest {
  /// Created if absent. For one run at a time, because a save removes attempts of other runs.
  fs::path checkpoints_dir;
  std::int64_t step = 0;  ///< optimizer updates made so far
  int rank = 0;
  int world_size = 1;
  std::string run_id;  ///< letters, digits, '.', '_', '-'
  /// Without sections of optimizer state on all ranks, weights only are saved.
  std::map<Section, std::vector<TensorPart>> parts;
  std::string model_config = "{}";  ///< JSON of the "model" section; rank 0's is saved
  /// Replicated state of the training loop. Of the ranks that pass it, the one with the smallest
  /// shard writes it (the last one on ties). Empty on all ranks: no trainer section.
  std::string trainer_json;
  /// Maximum size of the index; readers accept up to kMaxIndexBytes.
  std::int64_t max_index_bytes = kMaxIndexBytes;
  /// Largest chunk in bytes, a power of two >= 8; 0: chosen by chunk_bytes_of().
  std::int64_t chunk_bytes = 0;
  /// Called at each labelled point, for fault injection.
  std::function<void(std::string_view point)> at_point;
  void pass(std::string_view point) const {
    if (at_point) at_point(point);
  }
  /// Incremented as this rank makes progress, so that a watchdog can detect a hang; may be null.
  std::shared_ptr<std::atomic<std::uint64_t>> pulse;
  /// Set by the caller to cut pruning after the save short; may be null.
  std::shared_ptr<std::atomic<bool>> hurry;
  /// Bytes free on the file system of a directory, -1 if unknown. Tests replace it.
  std::function<std::int64_t(const fs::path& dir)> free_bytes = io::free_bytes;
};

/// Exchanges messages between the ranks of a save.
class SaveCoordinator {
 public:
  virtual ~SaveCoordinator() = default;
  /// All-gathers `mine`, at most a few KiB; returns the messages by rank. `phase` is the same on
  /// all ranks and contains the step. It recurs if a step is saved again: don't return messages of
  /// the earlier save.
  /// @throws CommError naming the ranks that did not answer in time
  virtual std::vector<std::string> exchange(const std::string& phase, std::string_view mine) = 0;
};

struct SaveReport {
  fs::path path;                 ///< the committed checkpoint
  std::int64_t bytes = 0;        ///< of this rank's shard
  std::int64_t total_bytes = 0;  ///< of all ranks' shards
  double seconds = 0;            ///< from call to commit
};

/// Saves a checkpoint. Called by all ranks of the coordinator, which carries no weights.
/// 1. Ranks exchange their sizes and check the free space. 2. Each rank writes its shard and its
/// part of the index into `step-N.<run id>.tmp/` and syncs them. 3. Rank 0 merges the parts into
/// the index and commits by one rename. If that replaces a committed checkpoint of the same step,
/// the ranks read the new shards back first.
///
/// Does not copy the data.
/// @throws IoError, the same on all ranks, naming rank, file and cause; CommError from the
///         coordinator. The attempt is then removed; other checkpoints are unchanged.
SaveReport save_checkpoint(const SaveRequest& request, SaveCoordinator& coordinator);

}  // namespace tessera::io
