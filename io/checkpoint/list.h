#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/base/file.h"
#include "io/checkpoint/index.h"
#include "io/checkpoint/reader.h"

namespace tessera::io {

enum class CheckpointState : std::uint8_t {
  Committed,  ///< valid index, all files in full size
  Broken,     ///< committed, but no longer readable
  Newer,      ///< committed, in a format that only a newer tessera reads
  Attempt,    ///< a save that is unfinished or under way
  Removing,   ///< a removal that is unfinished or under way
  SetAside,   ///< broken, and renamed by a run that resumed from an earlier one
};
/// "committed", "broken", "newer format", "attempt", "removing", "set aside"
std::string_view state_name(CheckpointState state);

struct ListedCheckpoint {
  fs::path path;
  std::int64_t step = 0;  ///< as its name says
  CheckpointState state = CheckpointState::Committed;
  std::string problem;  ///< reason why it is not usable; empty if committed
  /// Without tensors: what a list needs; empty unless the index could be read.
  std::optional<CheckpointIndex> index;
  std::vector<std::string> sections;  ///< "model", "optimizer", "trainer"
  std::int64_t bytes = 0;             ///< of the files that are there
  /// Seconds since 1970 of the save, or of the last write if not committed; empty if unknown.
  std::optional<std::int64_t> time;
};

/// Lists checkpoints, attempts and leftovers in a run or a directory of checkpoints, by step, then
/// by name. Reads indexes, but no data.
/// @param check  further checks: throws CorruptCheckpoint on a broken checkpoint, NewerFormat on
///               one that this build cannot read
/// @throws IoError if the directory cannot be read
std::vector<ListedCheckpoint> list_checkpoints(
    const fs::path& run_or_checkpoints_dir,
    const std::function<void(const CheckpointReader&)>& check = {});

/// Seconds since 1970 of "2026-01-31T12:00:00Z"; empty if it is no such time.
std::optional<std::int64_t> parse_time(const std::string& text);

}  // namespace tessera::io
