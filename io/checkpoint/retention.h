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

/// Which committed checkpoints stay once a later one is committed: each that any rule keeps.
struct Retention {
  int keep = 0;                 ///< newest ones; 0: all, whatever the other rules say
  std::int64_t keep_every = 0;  ///< those of steps that this divides stay for good; 0: none
  int keep_best = 0;            ///< those of the lowest loss; of equal ones the later
  /// Validation loss of a checkpoint; empty if it is not known: such a one is not among the best.
  /// One for which this throws NewerFormat is left alone, another Error makes it one of the best.
  std::function<std::optional<double>(const fs::path& checkpoint)> loss{};
  /// Steps whose checkpoints were found damaged as they were verified: they don't count for any
  /// rule, and go with the next that is removed. Kept by prune_checkpoints(), on every rank; may be
  /// null.
  std::shared_ptr<std::set<std::int64_t>> damaged{};
};

/// Removes the checkpoints that `retention` does not keep, of those up to and including the step of
/// `saved`, which was just saved and always stays. Those of later steps are left alone and do not
/// count: a run that went back to an earlier step must not lose what it saves to what it left.
/// Those that only a newer tessera reads never go, and do not count either; nor does one that may
/// be such, as an error of the disk keeps its index or its loss from being read.
///
/// Before the first is removed, the one that was saved is verified: rank 0 reads the index and
/// looks at the sizes of all files and the checksum of trainer.json, and each rank reads its own
/// shard back (see read_back): in about the time that the write took or less, on the calling
/// thread, and not if nothing is to be removed. Once saved.hurry is set, that is soon given up.
/// Each that goes is renamed, durably, to a name that nobody loads before its files go.
///
/// Collective, by all ranks of a save after it. A process that ends meanwhile leaves all of them.
/// @param saved  the request of that save; its parts are not looked at
/// @return the removed ones, by ascending step; on ranks other than 0 nothing
/// @throws IoError, the same on all ranks, if what was saved is damaged (its step is then among
///         retention.damaged) or could not all be read, naming rank, file, tensor and range, and
///         nothing was removed; on rank 0 also naming what cannot be removed; CommError of the
///         coordinator, and nothing was removed
std::vector<fs::path> prune_checkpoints(const SaveRequest& saved, const Retention& retention,
                                        SaveCoordinator& coordinator);

}  // namespace tessera::io
