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
#include "io/base/json.h"
#include "io/checkpoint/index.h"

namespace tessera::io {

/// The part of a tensor that a rank owns: elements [begin, end) of the whole tensor in row-major
/// order. `data` points at element `begin` and must stay unchanged until save_checkpoint returns.
/// begin == end only declares the tensor (a rank must do so for tensors without elements).
struct TensorPart {
  std::string name;
  Shape shape;  ///< of the whole tensor
  DType dtype = DType::F32;
  std::int64_t begin = 0, end = 0;
  const void* data = nullptr;
};

/// What one rank saves. Step, world size and run id must be equal on all ranks.
struct SaveRequest {
  /// Made if absent. It belongs to one run at a time: attempts that others left are removed.
  fs::path checkpoints_dir;
  std::int64_t step = 0;  ///< updates made so far
  int rank = 0;
  int world_size = 1;
  std::string run_id;  ///< letters, digits, '.', '_', '-'
  std::vector<TensorPart> model;
  std::vector<TensorPart> exp_avg, exp_avg_sq;  ///< empty on all ranks: weights only
  Json model_config;                            ///< "model" section of the configuration; rank 0's
  /// State that all ranks share: of those that give it, the one with the fewest bytes of its own
  /// writes it, the last of them if there are several. Empty on all ranks: no trainer section.
  std::string trainer_json;
  /// A larger index is not written; readers refuse what is over kMaxIndexBytes.
  std::int64_t max_index_bytes = kMaxIndexBytes;
  /// Of a chunk at most, a power of two from 8 on; 0: chunk_bytes_of() what all ranks save.
  std::int64_t chunk_bytes = 0;
  /// Called with the name of each labelled point that this rank passes, for fault injection.
  std::function<void(std::string_view point)> at_point;
  /// Counts on as this rank gets on with the save: who watches it sees whether it hangs.
  std::shared_ptr<std::atomic<std::uint64_t>> pulse;
  /// Set by who can't wait for old checkpoints to be removed; may be null.
  std::shared_ptr<std::atomic<bool>> hurry;
  /// Bytes free where the checkpoint goes, -1 if unknown; for fault injection, too.
  std::function<std::int64_t(const fs::path& dir)> free_bytes = io::free_bytes;
};

/// How the ranks of a save talk to each other; the trainer gives it, over its control channel.
class SaveCoordinator {
 public:
  virtual ~SaveCoordinator() = default;
  /// Every rank contributes `mine`, a few KiB at most whatever the model; returns all contributions
  /// by rank. `phase` is the same on all ranks and holds the step; it repeats if a step is saved
  /// again.
  /// @throws CommError naming the ranks that did not answer in time
  virtual std::vector<std::string> exchange(const std::string& phase, std::string_view mine) = 0;
};

/// For a world of one: returns what it is given.
class SoloCoordinator : public SaveCoordinator {
 public:
  std::vector<std::string> exchange(const std::string& phase, std::string_view mine) override;
};

struct SaveReport {
  fs::path path;                 ///< the committed checkpoint
  std::int64_t bytes = 0;        ///< this rank wrote
  std::int64_t total_bytes = 0;  ///< of all ranks' shards
  double seconds = 0;            ///< from call to commit
};

/// Saves a checkpoint of all ranks. Collective over the coordinator only; no rank sends its weights
/// anywhere. The ranks first tell each other how much they will write; as they write into one
/// directory, each looks whether there is room for all of it. Then each rank writes its shard, and
/// its part of the index, into `step-N.<run id>.tmp/` and syncs them; when all have, rank 0 merges
/// the parts into the index and commits by one rename. A committed checkpoint of the same step is
/// replaced in the same single step, after each rank has read its new shard back.
///
/// Called by all ranks in the same order. No copy of the data is made.
/// @throws IoError, the same on all ranks, naming the rank, file and cause if any rank failed; a
///         CommError of the coordinator. Either way the attempt is removed (if this process still
///         can) and former checkpoints stand.
SaveReport save_checkpoint(const SaveRequest& request, SaveCoordinator& coordinator);

}  // namespace tessera::io
