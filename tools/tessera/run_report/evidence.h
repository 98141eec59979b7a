#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/tessera/run_report/verdict.h"

namespace tessera::tools {

/// All that a run's directory tells of its last start: of the newest record, and of those that were
/// made in the same start.
struct RunEvidence {
  std::filesystem::path directory;
  std::vector<RankEvidence> ranks;  ///< one for each rank, ascending; empty: no record at all

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
  std::vector<std::string> problems;  ///< of files, missing or malformed; some 20 at most
};

/// Reads a run's directory; what can't be read is a line in `problems`. Waits for nobody: FIFOs are
/// not opened, and of long files the end is read.
/// @throws IoError if it is no directory of a run
RunEvidence gather_evidence(const std::filesystem::path& run_dir);

/// Looks whether a record's process still is, if it is one of this host and container.
ProcessState look_at(const comm::FlightRecord& record);

}  // namespace tessera::tools
