#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/tessera/run_report/verdict.h"

namespace tessera::tools {

/// Evidence on the last start of a run, the one that wrote the newest flight record.
struct RunEvidence {
  std::filesystem::path directory;
  std::vector<RankEvidence> ranks;  ///< by rank; empty: no rank left a record

  /// From the newest line of metrics.jsonl with a loss.
  std::optional<std::int64_t> last_step;
  std::optional<double> last_loss;
  /// The newest committed checkpoint; step -1: none.
  std::filesystem::path checkpoint;
  std::int64_t checkpoint_step = -1;
  /// From the newest line of saves.jsonl.
  std::optional<std::int64_t> saved_step;
  std::optional<double> save_seconds;

  std::map<int, std::vector<std::string>> log_tails;  ///< the last lines of logs/, by rank
  bool has_config = false;                            ///< config.json exists
  std::vector<std::string> problems;                  ///< missing or malformed files, at most 21
};

/// Reads a run's directory without blocking. Unreadable files become lines in `problems`.
/// @throws IoError if `run_dir` is not the directory of a run
RunEvidence gather_evidence(const std::filesystem::path& run_dir);

/// State of a record's process; Unknown if it ran on another host or in another container.
ProcessState look_at(const comm::FlightRecord& record);

}  // namespace tessera::tools
