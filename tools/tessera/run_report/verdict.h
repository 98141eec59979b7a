#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/flight_record.h"

namespace tessera::tools {

/// State of a record's process. Unknown: on another host or in another container.
enum class ProcessState : std::uint8_t { Unknown, Running, Stopped, Gone };
/// "unknown", "running", "stopped", "gone"
std::string_view process_state_name(ProcessState state);

/// Evidence on one rank.
struct RankEvidence {
  int rank = 0;
  std::optional<comm::FlightRecord> record;
  std::string problem;  ///< why there is no record
  ProcessState process = ProcessState::Unknown;
};

enum class VerdictKind : std::uint8_t {
  Running,
  Done,
  Killed,         ///< its process is gone without an end in the record, or others lost it
  Stopped,        ///< stopped or stuck while the others waited for it
  Mismatch,       ///< ranks called different collectives
  OutOfMemory,    ///< of that rank
  Error,          ///< another error of that rank
  Communication,  ///< failed without a known culprit
  NeverStarted,   ///< a rank left no record and never met the others
  Unclear
};
/// "running", "done", "killed", ... as --json has it
std::string_view verdict_name(VerdictKind kind);

struct Verdict {
  VerdictKind kind = VerdictKind::Unclear;
  std::vector<int> culprits;          ///< ascending; empty: none, or unknown
  std::string headline;               ///< one sentence that names them
  std::vector<std::string> evidence;  ///< one line each
};

/// Judges a run by its evidence. Pure.
///
/// Causes, in this order: ranks that called different collectives; a rank's own error (the first of
/// several); a rank that is gone (of several the one blamed by others, or behind); a rank that is
/// stopped, or for which others waited until their deadline or longer than `patience`.
/// Communication errors follow from these.
///
/// @param ranks        one for each rank of the run, ascending
/// @param now_wall_ns  nanoseconds since 1970
Verdict judge_run(std::span<const RankEvidence> ranks, std::int64_t now_wall_ns,
                  std::int64_t patience_ns = 10'000'000'000);

/// "reduce_scatter#88 (h.3) f32[1024]" inside a collective; else "step 12, after ..." or the phase.
std::string describe_activity(const comm::FlightRecord& record);
/// "0, 2, 5-900": ascending ranks as a short text.
std::string format_ranks(std::span<const int> ranks);
/// "rank 2 (host, pid 12)", or the number alone without a record.
std::string rank_name(const RankEvidence& rank);

}  // namespace tessera::tools
