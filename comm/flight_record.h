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

/// A flight record is malformed, incomplete, or no such record.
class CorruptRecord : public Error {
 public:
  template <typename... Args>
  explicit CorruptRecord(fmt::format_string<Args...> text, Args&&... args)
      : Error(fmt::format(text, std::forward<Args>(args)...)) {}
};

enum class FlightState : std::uint8_t { Empty, Queued, Running, Done, Failed };
/// "queued", "running", ...
std::string_view flight_state_name(FlightState state);

/// How a rank ended; Running: it has not, or it was killed. The last four are of communication.
enum class FlightEnd : std::uint8_t {
  Running,
  Done,
  Error,
  OutOfMemory,
  Timeout,
  PeerLost,
  Mismatch,
  Aborted,
  CutOff  ///< ranks live, and do not reach each other
};
/// "running", "done", "error", "out of memory", "timeout", ...
std::string_view flight_end_name(FlightEnd end);

/// A collective of a record. Times as FlightRecord's; 0: did not happen, or was not seen.
struct FlightCollective {
  Signature signature;
  std::uint64_t bytes = 0;
  std::int64_t queued_ns = 0, started_ns = 0, ended_ns = 0;
  FlightState state = FlightState::Empty;
};

/// What a rank wrote down of itself. Times are nanoseconds of its host's monotonic clock; those
/// named "wall" since 1970.
struct FlightRecord {
  int rank = 0, world_size = 1;
  std::string host, run_id, boot_id;
  std::int64_t pid = 0;
  std::uint64_t pid_start = 0, pid_namespace = 0;
  std::uint64_t start_id = 0;  ///< of all ranks of one start, and of no other; 0: not known yet
  std::int64_t start_wall_ns = 0, start_ns = 0;

  std::string phase;       ///< empty: none yet, or it could not be read
  std::int64_t step = -1;  ///< -1: none
  std::int64_t phase_entered_ns = 0;

  FlightEnd end = FlightEnd::Running;
  std::string end_text;
  int end_culprit = -1;
  std::int64_t end_ns = 0;

  std::vector<FlightCollective> collectives;  ///< by sequence number, at most the last 1000
  int unreadable = 0;                         ///< entries that were being written, or are garbage

  std::int64_t wall_ns(std::int64_t monotonic_ns) const {
    return start_wall_ns + (monotonic_ns - start_ns);
  }
  /// When it last wrote something.
  std::int64_t last_sign_ns() const;
  /// The newest collective that has started, else null: what the rank was in, or came out of last.
  /// One that was done before anybody saw it start counts, too.
  const FlightCollective* newest_started() const;
};

/// Reads the record of a rank that runs, has ended or was killed. Of one that runs, entries that
/// change meanwhile are read again, and left out if they change all the time. Takes no lock, waits
/// for nobody; links are not followed, FIFOs not opened.
/// @throws IoError if there is no such file or it can't be read, CorruptRecord if it is no record
///         or is cut, Unsupported if a newer version wrote it
FlightRecord read_flight_record(const std::filesystem::path& path);
/// The same of bytes in memory. @param source  named in errors
FlightRecord parse_flight_record(std::span<const std::byte> bytes, const std::string& source);

/// "2026-01-31T12:00:00.123Z"
std::string format_wall_time(std::int64_t wall_ns);

/// Lines for people: who, where, how it ended, and the last collectives, the newest at the end.
std::string describe(const FlightRecord& record, int last_n);

}  // namespace tessera::comm
