#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "comm/collective.h"

namespace tessera::comm {

// The layout of a flight record, the file that a FlightRecorder maps and read_flight_record()
// reads. Little-endian, of a fixed size: a header of 1024 bytes, then 1000 entries of 128 bytes;
// the entry of the collective with sequence number n is the (n mod 1000)-th. Texts are padded with
// zeros. Times are nanoseconds: "wall" since 1970, all others of the host's monotonic clock, on
// which the start is given, too.
//
// The header's fixed part, all but `start_id`, is written before the file gets its name. What
// changes later is guarded by a version: odd while it is being written, another even number
// afterwards. A rank that is killed in the middle of that leaves an odd one: that entry is lost,
// and no other.

inline constexpr std::array<char, 8> kFlightMagic = {'t', 'e', 's', 's', 'f', 'l', 't', '\n'};
inline constexpr std::uint32_t kFlightVersion = 1;
inline constexpr std::uint32_t kFlightEntries = 1000;

/// The part of the header that says where the rank is.
struct FlightPhase {
  std::uint64_t version = 0;
  std::array<char, 32> name{};
  std::int64_t step = 0;  ///< -1: outside of steps
  std::int64_t entered_ns = 0;
};

/// The part of the header that says how the rank ended. `kind` is written last.
struct FlightEnding {
  std::int64_t time_ns = 0;
  std::int64_t culprit = -1;  ///< the rank that it blames; -1: none
  std::array<char, 400> text{};
  std::uint64_t kind = 0;  ///< FlightEnd
};

struct FlightHeader {
  std::array<char, 8> magic = kFlightMagic;
  std::uint32_t version = kFlightVersion;
  std::uint32_t header_bytes = 1024;
  std::uint32_t entries = kFlightEntries;
  std::uint32_t entry_bytes = 128;
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::int64_t pid = 0;
  std::uint64_t pid_start = 0;      ///< when the process began: clock ticks since the host's start
  std::uint64_t pid_namespace = 0;  ///< where `pid` counts; 0: unknown
  std::int64_t start_wall_ns = 0;
  std::int64_t start_ns = 0;
  std::array<char, 40> boot_id{};  ///< of the host, one for each start of its kernel
  std::array<char, 72> host{};
  std::array<char, 64> run_id{};
  FlightPhase phase;
  FlightEnding ending;
  /// What all ranks of one start share and no other start does; 0: this rank has not met another
  /// yet. Written once, as one word, when it has.
  std::uint64_t start_id = 0;
  std::array<char, 288> reserved{};
};
static_assert(offsetof(FlightHeader, boot_id) == 72);
static_assert(offsetof(FlightHeader, phase) == 248);
static_assert(offsetof(FlightHeader, ending) == 304);
static_assert(offsetof(FlightHeader, start_id) == 728);
static_assert(sizeof(FlightHeader) == 1024);

struct FlightEntry {
  std::uint64_t version = 0;  ///< 0: never written
  Signature signature;
  std::uint64_t bytes = 0;
  std::int64_t queued_ns = 0;
  std::int64_t started_ns = 0;  ///< 0: not seen to have started
  std::int64_t ended_ns = 0;    ///< 0: not ended
  std::uint64_t state = 0;      ///< FlightState
  std::array<std::uint64_t, 2> reserved{};
};
static_assert(sizeof(FlightEntry) == 128 && sizeof(Signature) == 64);
static_assert(std::is_trivially_copyable_v<FlightHeader> &&
              std::is_trivially_copyable_v<FlightEntry>);

/// Of more ranks no record is believed: what is read must not decide how much memory a reader
/// takes.
inline constexpr std::int32_t kFlightMaxWorldSize = 65'536;

inline constexpr std::size_t kFlightBytes =
    sizeof(FlightHeader) + std::size_t{kFlightEntries} * sizeof(FlightEntry);

}  // namespace tessera::comm
