#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "io/checkpoint/reader.h"

namespace tessera::io {

/// "step-00001200"
std::string checkpoint_name(std::int64_t step);

/// Opens a checkpoint, and looks for a second for files that are missing or cut: a network file
/// system may show files late, or not in their full size yet, on a host that did not write them.
/// @throws as CheckpointReader::open
CheckpointReader open_patiently(const fs::path& path);

/// A committed checkpoint: a directory named after its step that holds an index, or that cannot be
/// looked into.
struct CheckpointEntry {
  std::int64_t step = 0;
  fs::path path;
};

/// Committed checkpoints of a run directory (which has `checkpoints/`) or of a directory of
/// checkpoints, by ascending step. Attempts (`*.tmp`) are not among them, and `latest` is not read.
/// @throws IoError if the directory cannot be read
std::vector<CheckpointEntry> find_checkpoints(const fs::path& run_or_checkpoints_dir);

struct NewestCheckpoint {
  std::optional<CheckpointReader> reader;  ///< empty if there is no valid one
  std::vector<std::string> skipped;        ///< newer ones that are broken: why, one line each
};

struct NewestOptions {
  /// Reads everything, on as many threads as the machine has, up to 16. Else checksums are verified
  /// as data is read.
  bool verify_data = false;
  std::set<fs::path> passed_over{};  ///< not to be looked at, as whoever asks knows better
  /// What else must be right; throws CorruptCheckpoint on one that is broken. What else it throws,
  /// and NewerFormat, ends the search.
  std::function<void(const CheckpointReader&)> check{};
};

/// Newest checkpoint whose index is valid and whose files are there in their full size (what is not
/// is looked at again for a second: network file systems show files late).
/// @throws IoError if one cannot be opened or looked at (its permissions, a server that does not
///         answer), NewerFormat if only a newer tessera reads it: nobody is handed older weights
///         for that
NewestCheckpoint newest_valid(const fs::path& run_or_checkpoints_dir,
                              const NewestOptions& options = {});

/// Directory of what a user names as CHECKPOINT, found but not opened; see open_checkpoint.
/// @throws InvalidArgument if there is no checkpoint or no such step, IoError
fs::path locate_checkpoint(const fs::path& path, std::optional<std::int64_t> step = {});

/// What a user names as CHECKPOINT: a checkpoint directory itself, or a run or directory of
/// checkpoints, of which it takes the given step or else the newest committed one. That one being
/// broken is an error: nobody is handed older weights than he asked for without being told.
/// @throws InvalidArgument if there is no checkpoint or no such step, IoError, CorruptCheckpoint
CheckpointReader open_checkpoint(const fs::path& path, std::optional<std::int64_t> step = {});

}  // namespace tessera::io
