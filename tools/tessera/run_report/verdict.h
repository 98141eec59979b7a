#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/flight_record.h"

namespace tessera::tools {

/// Of a record's process. Unknown: it is, or was, on another host or in another container.
enum class ProcessState : std::uint8_t { Unknown, Running, Stopped, Gone };
/// "unknown", "running", "stopped", "gone"
std::string_view process_state_name(ProcessState state);

/// What is known of one rank.
struct RankEvidence {
  int rank = 0;
  std::optional<comm::FlightRecord> record;
  std::string problem;  ///< why there is none
  ProcessState process = ProcessState::Unknown;
};

enum class VerdictKind : std::uint8_t {
  Running,
  Done,
  Killed,         ///< no word of an end, and no process; or no record, and lost, as others say
  Stopped,        ///< stands still, or did: the others waited for it
  Mismatch,       ///< ranks called different collectives
  OutOfMemory,    ///< of its own
  Error,          ///< of its own, beside communication
  Communication,  ///< failed, and no rank is known to be the cause
  NeverStarted,   ///< a rank left no record, and the others have not met it
  Unclear
};
/// "running", "done", "killed", ... as --json has it
std::string_view verdict_name(VerdictKind kind);

struct Verdict {
  VerdictKind kind = VerdictKind::Unclear;
  std::vector<int> culprits;          ///< ascending; empty: none, or unknown
  std::string headline;               ///< one sentence that names them
  std::vector<std::string> evidence;  ///< what it follows from, a line each
};

/// What became of a run, from what its ranks left. Pure: the same evidence, the same verdict.
///
/// The cause is looked for in this order: ranks that called different collectives; an error of a
/// rank's own, the first if there are several; a rank that is gone without a word, of several the
/// one that others blame or that is behind; one that is stopped, or for which others waited until
/// their deadline, or wait longer than `patience`. Errors of communication follow from these.
///
/// @param ranks        one for each rank of the run, ascending
/// @param now_wall_ns  nanoseconds since 1970
Verdict judge_run(std::span<const RankEvidence> ranks, std::int64_t now_wall_ns,
                  std::int64_t patience_ns = 10'000'000'000);

/// "reduce_scatter#88 (h.3) f32[1024]" if it was in one; "step 12, after ..." or the phase alone if
/// not.
std::string describe_activity(const comm::FlightRecord& record);
/// "0, 2, 5-900": ascending numbers of ranks, never a long text.
std::string format_ranks(std::span<const int> ranks);
/// "rank 2 (host, pid 12)"; the bare number if there is no record.
std::string rank_name(const RankEvidence& rank);

}  // namespace tessera::tools
