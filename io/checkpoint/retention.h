#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "io/base/file.h"

namespace tessera::io {

/// Which committed checkpoints stay once a later one is committed: each that any rule keeps.
struct Retention {
  int keep = 0;                 ///< newest ones; 0: all, whatever the other rules say
  std::int64_t keep_every = 0;  ///< those of steps that this divides stay for good; 0: none
  int keep_best = 0;            ///< those of the lowest loss; of equal ones the later
  /// Validation loss of a checkpoint; empty if it is not known: such a one is not among the best.
  std::function<std::optional<double>(const fs::path& checkpoint)> loss{};
};

/// Removes the checkpoints that `retention` does not keep, of those up to and including step
/// `saved`, which was just saved and always stays. Those of later steps are left alone and do not
/// count: a run that went back to an earlier step must not lose what it saves to what it left.
///
/// Before the first is removed, that of step `saved` is verified as CheckpointReader::open does:
/// its index is read and parsed, all its files are there in their full size, and trainer.json has
/// its checksum. The data of the shards, which was synced, is not read again. Each that goes is
/// renamed, durably, to a name that nobody loads before its files go.
///
/// Only one rank may call it, after a save.
/// @return the removed ones, by ascending step
/// @throws CorruptCheckpoint, InvalidArgument or IoError if the checkpoint of `saved` is not as it
///         should be, and nothing was removed; IoError naming what cannot be removed
std::vector<fs::path> prune_checkpoints(const fs::path& checkpoints_dir, const Retention& retention,
                                        std::int64_t saved);

}  // namespace tessera::io
