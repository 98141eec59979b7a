#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::tools {

/// Finds the checkpoint that a run continues, if any (rank 0). Checks index, headers, sizes and
/// trainer.json; ranks verify tensors as they read them. Changes nothing on disk.
/// @param resume    checkpoint.resume; another run's checkpoint counts only until this run has its
///                  own
/// @param unusable  checkpoints that an earlier attempt could not read, with the reasons
/// @param notes     gets a line for each newer broken checkpoint that is not in `unusable`
/// @throws CorruptCheckpoint if all are broken, or the one that `resume` names is: starting anew
///         would overwrite the run;
///         InvalidArgument if `resume` names nothing, or a checkpoint older than the run's newest,
///         or is "never" and the run exists; IoError if one is unreadable here, NewerFormat if a
///         newer tessera wrote it: no older checkpoint takes its place
std::optional<std::filesystem::path> find_resume(
    const std::filesystem::path& run_dir, const std::string& resume,
    const std::map<std::filesystem::path, std::string>& unusable, std::vector<std::string>& notes);

/// Renames a run's checkpoints later than `step` to `.unusable`, so that they do not count as the
/// newest.
/// @return one line for each
/// @throws IoError
std::vector<std::string> set_aside_later(const std::filesystem::path& run_dir, std::int64_t step);

}  // namespace tessera::tools
