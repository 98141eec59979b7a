#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::tools {

/// Which checkpoint a run starts from, as rank 0 finds it; empty: none. Index, headers, sizes and
/// trainer.json are looked at; checksums of tensors are verified by the ranks as they read.
/// Changes nothing.
/// @param resume    checkpoint.resume; a checkpoint of another run counts only until this one has
///                  its own
/// @param unusable  those that could not be read after an earlier call, with why
/// @param notes     receives a line for each broken checkpoint newer than the one found, except
///                  those of `unusable`
/// @throws CorruptCheckpoint if there are only broken ones, with why for each, or if the one that
///         `resume` names cannot be used: starting anew would write over the run;
///         InvalidArgument if `resume` names what is not there or comes before checkpoints that the
///         run has already, or if the run must not be continued (resume=never) but is there;
///         IoError if one cannot be looked at here, NewerFormat if only a newer tessera reads it:
///         nobody is handed older weights for that
std::optional<std::filesystem::path> find_resume(
    const std::filesystem::path& run_dir, const std::string& resume,
    const std::map<std::filesystem::path, std::string>& unusable, std::vector<std::string>& notes);

/// Gives checkpoints of a run that are later than `step`, from which it goes on, another name
/// (`.unusable`): they must not count as the newest, nor push good ones out.
/// @return one line for each
/// @throws IoError
std::vector<std::string> set_aside_later(const std::filesystem::path& run_dir, std::int64_t step);

}  // namespace tessera::tools
