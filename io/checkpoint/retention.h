#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "io/base/file.h"
#include "io/checkpoint/save.h"

namespace tessera::io {

/// Rules that keep committed checkpoints; a checkpoint stays if any rule keeps it.
struct Retention {
  int keep = 0;                 ///< keep this many newest; 0: keep all, ignoring other rules
  std::int64_t keep_every = 0;  ///< keep steps divisible by this; 0: none
  int keep_best = 0;            ///< keep this many of lowest loss; later steps win ties
  /// Validation loss of a checkpoint. Empty: unknown, never one of the best. If this throws
  /// NewerFormat, the checkpoint is never removed; on another Error it is kept as one of the best.
  std::function<std::optional<double>(const fs::path& checkpoint)> loss{};
  /// Steps of checkpoints that failed verification. No rule counts them; the next pruning removes
  /// them. Updated by prune_checkpoints() on every rank; may be null.
  std::shared_ptr<std::set<std::int64_t>> damaged{};
};

/// Removes the checkpoints that `retention` does not keep. The checkpoint just saved always stays.
/// Two kinds are neither removed nor counted by any rule: checkpoints of later steps, so that a run
/// that went back to an earlier step keeps its new saves; and those in a newer format, or with an
/// unreadable index or loss, because these may be in a newer format.
///
/// Verifies the new checkpoint before it removes any: rank 0 checks the index, the sizes of all
/// files and trainer.json; each rank reads its share of the shards back on the calling thread (see
/// read_back), in about the time of the write. Gives up soon after saved.hurry is set.
/// Renames each checkpoint durably to `*.pruned.tmp` before deleting its files.
///
/// Called by all ranks of a save after it.
/// @param saved  request of the save; the data of its parts is not read
/// @return the removed checkpoints, by ascending step; empty on ranks other than 0
/// @throws IoError, the same on all ranks, before any removal, if the new checkpoint is damaged
///         (its step is then in retention.damaged) or unreadable, naming rank, file, tensor and
///         range; IoError on rank 0 if a checkpoint cannot be removed; CommError from the
///         coordinator, before any removal
std::vector<fs::path> prune_checkpoints(const SaveRequest& saved, const Retention& retention,
                                        SaveCoordinator& coordinator);

}  // namespace tessera::io
