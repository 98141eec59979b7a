#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::tools {

/// Finds the checkpoint that a run resumes from, if any (rank 0). Checks index, headers, sizes and
/// trainer.json; ranks verify tensors as they read them. Changes nothing on disk.
/// @param resume    checkpoint.resume; a path is used only until this run has its own checkpoints
/// @param unusable  checkpoints that an earlier attempt could not read, with the reasons
/// @param notes     receives a line for each newer broken checkpoint that is not in `unusable`
/// @throws CorruptCheckpoint if all checkpoints, or the one that `resume` names, are broken: a new
///         run would overwrite them; InvalidArgument if `resume` does not exist, is older than the
///         run's newest checkpoint, or is "never" for an existing run; IoError on an unreadable
///         checkpoint and NewerFormat on a newer format: no older checkpoint is used instead
std::optional<std::filesystem::path> find_resume(
    const std::filesystem::path& run_dir, const std::string& resume,
    const std::map<std::filesystem::path, std::string>& unusable, std::vector<std::string>& notes);

/// Renames a run's checkpoints later than `step` to `.unusable`, so that they are not resumed from.
/// @return one line for each
/// @throws IoError
std::vector<std::string> set_aside_later(const std::filesystem::path& run_dir, std::int64_t step);

}  // namespace tessera::tools
