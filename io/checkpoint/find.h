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

/// Opens a checkpoint. Retries for up to a second on missing or truncated files, which a network
/// file system may show late to other hosts than the writer.
/// @throws as CheckpointReader::open
CheckpointReader open_patiently(const fs::path& path);

/// An item `step-N...` of a directory of checkpoints.
struct StepItem {
  std::int64_t step = 0;
  std::string ending;  ///< after the number: "", ".run-a.tmp"
  fs::path path;
};

/// Items of a run directory (which has `checkpoints/`) or of a directory of checkpoints, by step,
/// then by name. @throws IoError if the directory cannot be read
std::vector<StepItem> list_steps(const fs::path& run_or_checkpoints_dir);

/// A committed checkpoint: a directory `step-*` with an index, or unreadable.
struct CheckpointEntry {
  std::int64_t step = 0;
  fs::path path;
};

/// Committed checkpoints of list_steps. Ignores attempts (`*.tmp`).
std::vector<CheckpointEntry> find_checkpoints(const fs::path& run_or_checkpoints_dir);

struct NewestCheckpoint {
  std::optional<CheckpointReader> reader;  ///< empty if none is valid
  std::vector<std::string> skipped;        ///< one line for each newer, broken checkpoint
};

struct NewestOptions {
  /// Verifies all data, on as many threads as the machine has, up to 16.
  bool verify_data = false;
  std::set<fs::path> passed_over{};  ///< checkpoints to skip silently
  /// Additional check; throws CorruptCheckpoint to skip a checkpoint. Other errors, and
  /// NewerFormat, end the search.
  std::function<void(const CheckpointReader&)> check{};
};

/// Newest checkpoint with a valid index and all files in full size; see open_patiently.
/// @throws IoError if a checkpoint cannot be read (permissions, an unreachable server), NewerFormat
///         if it needs a newer tessera; never falls back to older weights then
NewestCheckpoint newest_valid(const fs::path& run_or_checkpoints_dir,
                              const NewestOptions& options = {});

/// Directory of a command's CHECKPOINT argument, without opening it; see open_checkpoint.
/// @throws InvalidArgument if there is no checkpoint or no such step, IoError
fs::path locate_checkpoint(const fs::path& path, std::optional<std::int64_t> step = {});

/// Opens a command's CHECKPOINT argument: a checkpoint directory, or the given step (default: the
/// newest committed one) of a run or directory of checkpoints. Never falls back to an older one.
/// @throws InvalidArgument if there is no checkpoint or no such step, IoError, CorruptCheckpoint
CheckpointReader open_checkpoint(const fs::path& path, std::optional<std::int64_t> step = {});

}  // namespace tessera::io
