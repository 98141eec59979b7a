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
  Attempt,    ///< a save that is in progress or was interrupted
  Removing,   ///< a removal that is in progress or was interrupted
  SetAside,   ///< broken, and renamed by a run that resumed from an earlier checkpoint
};
/// "committed", "broken", "newer format", "attempt", "removing", "set aside"
std::string_view state_name(CheckpointState state);

struct ListedCheckpoint {
  fs::path path;
  std::int64_t step = 0;  ///< from the directory's name
  CheckpointState state = CheckpointState::Committed;
  std::string problem;  ///< why it is not usable; empty if committed
  /// The index without its tensors; empty if unreadable.
  std::optional<CheckpointIndex> index;
  std::vector<std::string> sections;  ///< "model", "optimizer", "trainer"
  std::int64_t bytes = 0;             ///< total size of the existing files
  /// Unix time of the save or, if not readable, of the last write; empty if unknown.
  std::optional<std::int64_t> time;
};

/// Lists the checkpoints of a run or a directory of checkpoints in every CheckpointState, sorted by
/// step, then by name. Reads indexes, but no data.
/// @param check  additional check of a readable checkpoint; throws CorruptCheckpoint if it is
///               broken, NewerFormat if this build cannot read it
/// @throws IoError if the directory cannot be read
std::vector<ListedCheckpoint> list_checkpoints(
    const fs::path& run_or_checkpoints_dir,
    const std::function<void(const CheckpointReader&)>& check = {});

/// Unix time of "2026-01-31T12:00:00Z"; empty if the text has another form.
std::optional<std::int64_t> parse_time(const std::string& text);

}  // namespace tessera::io
