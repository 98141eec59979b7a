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

/// Opens a checkpoint. Retries missing or truncated files for up to a second, because a network
/// file system may show new files to other hosts only after a delay.
/// @throws as CheckpointReader::open
CheckpointReader open_patiently(const fs::path& path);

/// An entry `step-N...` of a directory of checkpoints.
struct StepItem {
  std::int64_t step = 0;
  std::string ending;  ///< rest of the name after the number: "", ".run-a.tmp"
  fs::path path;
};

/// Entries `step-N...` of a run directory (in its `checkpoints/`) or of a directory of checkpoints,
/// sorted by step, then by name.
/// @throws InvalidArgument if it is a file, IoError if it cannot be read
std::vector<StepItem> list_steps(const fs::path& run_or_checkpoints_dir);

/// Committed checkpoints in list_steps(): directories `step-N` with an index, or unreadable ones.
std::vector<StepItem> find_checkpoints(const fs::path& run_or_checkpoints_dir);

struct NewestCheckpoint {
  std::optional<CheckpointReader> reader;  ///< empty if none is valid
  std::vector<std::string> skipped;        ///< one line for each newer, broken checkpoint
};

struct NewestOptions {
  /// Verify all data, on up to 16 threads.
  bool verify_data = false;
  std::set<fs::path> passed_over{};  ///< checkpoints to skip silently
  /// Additional check; throws CorruptCheckpoint to skip a checkpoint. Other errors, and
  /// NewerFormat, end the search.
  std::function<void(const CheckpointReader&)> check{};
};

/// Opens the newest checkpoint with a valid index and all files in full size; see open_patiently.
/// @throws IoError if a checkpoint cannot be read (permissions, an unreachable server), NewerFormat
///         if it needs a newer tessera: skipping it would silently use older weights
NewestCheckpoint newest_valid(const fs::path& run_or_checkpoints_dir,
                              const NewestOptions& options = {});

/// Finds the directory that open_checkpoint would open, without opening it.
/// @throws InvalidArgument if there is no checkpoint or no such step; Unsupported, with advice, if it
///         is of another program (see describe_other_format); IoError
fs::path locate_checkpoint(const fs::path& path, std::optional<std::int64_t> step = {});

/// Opens a command's CHECKPOINT argument: a checkpoint directory, or the given step (default: the
/// newest committed one) of a run or directory of checkpoints. Never falls back to an older one.
/// @throws as locate_checkpoint; CorruptCheckpoint
CheckpointReader open_checkpoint(const fs::path& path, std::optional<std::int64_t> step = {});

}  // namespace tessera::io
