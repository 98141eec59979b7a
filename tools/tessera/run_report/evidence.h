#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/tessera/run_report/verdict.h"

namespace tessera::tools {

/// Evidence on the last start of a run: the newest flight record, and those of the same start.
struct RunEvidence {
  std::filesystem::path directory;
  std::vector<RankEvidence> ranks;  ///< by rank; empty: no record at all

  /// The newest line of metrics.jsonl that has a loss.
  std::optional<std::int64_t> last_step;
  std::optional<double> last_loss;
  /// The newest checkpoint whose index is valid and whose files are there; step -1: none.
  std::filesystem::path checkpoint;
  std::int64_t checkpoint_step = -1;
  /// The last line of saves.jsonl: a save of this step took so long.
  std::optional<std::int64_t> saved_step;
  std::optional<double> save_seconds;

  std::map<int, std::vector<std::string>> log_tails;  ///< the last lines of logs/, by rank
  bool has_config = false;                            ///< config.json is there
  std::vector<std::string> problems;  ///< missing or malformed files, about 20 at most
};

/// Reads a run's directory without blocking; long files from their end. Unreadable files become
/// lines in `problems`.
/// @throws IoError if it is no directory of a run
RunEvidence gather_evidence(const std::filesystem::path& run_dir);

/// State of a record's process, if it ran on this host and in this container.
ProcessState look_at(const comm::FlightRecord& record);

}  // namespace tessera::tools
