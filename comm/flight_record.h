#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/collective.h"
#include "core/base/error.h"

namespace tessera::comm {

/// The file is malformed, truncated, or not a flight record.
class CorruptRecord : public Error {
 public:
  template <typename... Args>
  explicit CorruptRecord(fmt::format_string<Args...> text, Args&&... args)
      : Error(fmt::format(text, std::forward<Args>(args)...)) {}
};

enum class FlightState : std::uint8_t { Empty, Queued, Running, Done, Failed };
/// "queued", "running", ...
std::string_view flight_state_name(FlightState state);

/// How a rank ended. Running: still running, or killed. From Timeout on: communication failures.
enum class FlightEnd : std::uint8_t {
  Running,
  Done,
  Error,
  OutOfMemory,
  Timeout,
  PeerLost,
  Mismatch,
  Aborted,
  CutOff  ///< only in records of earlier versions
};
/// "running", "done", "error", "out of memory", "timeout", ...
std::string_view flight_end_name(FlightEnd end);

/// A recorded collective. Times as in FlightRecord; 0: did not happen, or was not observed.
struct FlightCollective {
  Signature signature;
  std::uint64_t bytes = 0;
  std::int64_t queued_ns = 0, started_ns = 0, ended_ns = 0;
  FlightState state = FlightState::Empty;
  std::uint64_t number = 0;  ///< position among all collectives of the rank
  std::uint64_t group = 0;   ///< id of the subgroup, equal on its members; 0: all ranks
  std::string group_name = {};

  /// "all_gather#12 (h.3) f32[1024] of the shard group of ranks 2, 3"
  std::string describe() const;
};

/// Contents of a flight record. Times are nanoseconds of the host's monotonic clock; those named
/// "wall" since 1970.
struct FlightRecord {
  int rank = 0, world_size = 1;
  std::string host, run_id, boot_id;
  std::int64_t pid = 0;
  std::uint64_t pid_start = 0, pid_namespace = 0;
  std::uint64_t start_id = 0;  ///< shared by all ranks of one start; 0: not known yet
  std::int64_t start_wall_ns = 0, start_ns = 0;

  std::string phase;       ///< empty: none yet, or unreadable
  std::int64_t step = -1;  ///< -1: none
  std::int64_t phase_entered_ns = 0;

  FlightEnd end = FlightEnd::Running;
  std::string end_text;
  int end_culprit = -1;
  std::int64_t end_ns = 0;

  std::vector<FlightCollective>
      collectives;     ///< in the order of their start_, at most the last 1000
  int unreadable = 0;  ///< number of malformed or half-written entries

  std::int64_t wall_ns(std::int64_t monotonic_ns) const {
    return start_wall_ns + (monotonic_ns - start_ns);
  }
  /// Latest time in the record.
  std::int64_t last_sign_ns() const;
  /// The newest running collective, else the newest that has ended; null: none has started.
  const FlightCollective* newest_started() const;
};

/// Reads the record of a running, ended or killed rank without locks. Entries that change during
/// the read are read again, then skipped if they keep changing. Refuses symlinks and FIFOs.
/// @throws IoError if the file can't be read, CorruptRecord if it is malformed or truncated,
///   Unsupported if a newer version wrote it
FlightRecord read_flight_record(const std::filesystem::path& path);
/// Parses a record in memory. @param source  name of the record in errors
FlightRecord parse_flight_record(std::span<const std::byte> bytes, const std::string& source);

/// "2026-01-31T12:00:00.123Z"
std::string format_wall_time(std::int64_t wall_ns);

/// Text for people: rank, process, phase, end, and the last `last_n` collectives, newest last.
std::string describe(const FlightRecord& record, int last_n);

}  // namespace tessera::comm
