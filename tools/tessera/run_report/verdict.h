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
std::string_view process_state_name(ProcessState state);

struct RankEvidence {
  int rank = 0;
  std::optional<comm::FlightRecord> record;
  std::string problem;  ///< why there is no record
  ProcessState process = ProcessState::Unknown;
};

enum class VerdictKind : std::uint8_t {
  Running,
  Done,
  Killed,         ///< the process is gone and recorded no end, or other ranks lost it
  Stopped,        ///< stopped or stuck while other ranks waited for it
  Mismatch,       ///< ranks called different collectives
  OutOfMemory,    ///< a rank ran out of memory
  Error,          ///< a rank failed by another error
  Communication,  ///< communication failed without a known culprit
  NeverStarted,   ///< a rank left no record and did not finish the rendezvous
  Unclear
};
std::string_view verdict_name(VerdictKind kind);

struct Verdict {
  VerdictKind kind = VerdictKind::Unclear;
  std::vector<int> culprits;          ///< ascending; empty: none or unknown
  std::string headline;               ///< one sentence
  std::vector<std::string> evidence;  ///< one line each
};

/// Finds the root cause, the first of these that applies: ranks called different collectives; a
/// rank failed by an error of its own; a process is gone (of several, the one that others blame,
/// else the least advanced); a rank is stopped, or others waited for it until the deadline or
/// longer than `patience_ns`. Communication errors are consequences of these.
///
/// @param ranks        one for each rank, ascending
/// @param now_wall_ns  nanoseconds since 1970
Verdict judge_run(std::span<const RankEvidence> ranks, std::int64_t now_wall_ns,
                  std::int64_t patience_ns = 10'000'000'000);

/// "reduce_scatter#88 (h.3) f32[1024]" inside a collective; else "step 12, after ..." or the phase.
std::string describe_activity(const comm::FlightRecord& record);
/// "0, 2, 5-900"
std::string format_ranks(std::span<const int> ranks);
/// "rank 2 (host, pid 12)", or "rank 2" without a record.
std::string rank_name(const RankEvidence& rank);

}  // namespace tessera::tools
