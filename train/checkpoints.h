#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/sharding/sharded_model.h"
#include "core/optim/optimizer.h"
#include "train/ranks.h"

namespace tessera::train {

struct CheckpointOptions {
  std::string model = "{}";    ///< JSON object that describes the model, stored in the index
  int keep = 0;                ///< newest checkpoints to keep; 0: all
  bool with_optimizer = true;  ///< save the optimizer's state, too
  bool in_background = true;   ///< needs host memory for a copy of this rank's share
  /// Time without progress after which a save counts as hanging.
  std::chrono::milliseconds timeout{600'000};
};

/// Saves a sharded model to RUN_DIR/checkpoints/step-N, and loads it at any number of ranks. Each
/// checkpoint is committed by one rename. Collective.
class Checkpoints {
 public:
  /// Locks the run's directory for this process. `rank`, `model` and `optimizer` must outlive this.
  /// @throws OutOfMemory; InvalidArgument naming the holder if another job has the lock; IoError
  Checkpoints(std::string run_dir, Rank& rank, comm::ShardedModel& model,
              const optim::Optimizer& optimizer, const CheckpointOptions& options = {});
  /// Waits for a save in flight, briefly if an exception is the reason. Its errors are lost; call
  /// finish().
  ~Checkpoints();
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  /// Loads the newest checkpoint that all ranks can read; an older one if files are damaged.
  /// Without saved optimizer state (see CheckpointOptions) that starts with zeros.
  /// @return its step; 0 if the run has none, and the model is unchanged
  /// @throws InvalidArgument if tensors, CheckpointOptions::model or the optimizer don't fit;
  ///         IoError, CorruptCheckpoint if the run has checkpoints and none is readable
  std::int64_t load_latest();
  /// Why load_latest() passed over newer checkpoints; equal on all ranks.
  const std::vector<std::string>& skipped() const;
  /// Saves, after `step` updates. Returns early if saves run in the background.
  /// @throws IoError if this save, or the former in the background, failed; NonFiniteLoss; CommError
  void save(std::int64_t step);
  /// Waits for the save in flight, if any, and saves unless `step` is saved. @throws as save()
  void finish(std::int64_t step);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::train
