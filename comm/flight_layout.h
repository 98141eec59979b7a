#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "comm/collective.h"

namespace tessera::comm {

// Layout of a flight record file. Little-endian: a header of 1024 bytes, then 1000 entries of 128
// bytes; the n-th recorded collective (from 0, over all communicators) is in entry n mod 1000. Texts
// are zero-padded. Times are nanoseconds: "wall" since 1970, others of the host's monotonic clock;
// the start is given in both.
//
// Version 1 had no groups: `groups`, `number` and `group` are zero, and the sequence number is the
// number.
//
// The header's fixed part, except `start_id`, is written before the file is renamed into place.
// The phase and the entries change later; each has a version, which is odd during a write. If the
// rank is killed meanwhile, only that part is lost.

inline constexpr std::array<char, 8> kFlightMagic = {'t', 'e', 's', 's', 'f', 'l', 't', '\n'};
inline constexpr std::uint32_t kFlightVersion = 2;
inline constexpr std::uint32_t kFlightEntries = 1000;

struct FlightPhase {
  std::uint64_t version = 0;
  std::array<char, 32> name{};
  std::int64_t step = 0;  ///< -1: outside of steps
  std::int64_t entered_ns = 0;
};

/// `kind` is written last; if it is not 0, the rest is complete.
struct FlightEnding {
  std::int64_t time_ns = 0;
  std::int64_t culprit = -1;  ///< blamed rank; -1: none
  std::array<char, 400> text{};
  std::uint64_t kind = 0;  ///< FlightEnd
};

/// Name of a group of ranks; written once, the id last.
struct FlightGroup {
  std::array<char, 40> name{};  ///< "shard group of ranks 2, 3"
  std::uint64_t id = 0;         ///< Subgroup::id(); 0: not used
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
  std::uint64_t pid_start = 0;      ///< process start, in clock ticks since boot
  std::uint64_t pid_namespace = 0;  ///< namespace of `pid`; 0: unknown
  std::int64_t start_wall_ns = 0;
  std::int64_t start_ns = 0;
  std::array<char, 40> boot_id{};  ///< changes at each boot of the host
  std::array<char, 72> host{};
  std::array<char, 64> run_id{};
  FlightPhase phase;
  FlightEnding ending;
  /// Id shared by all ranks of one start; 0 until known. Written once, atomically.
  std::uint64_t start_id = 0;
  std::array<FlightGroup, 6> groups{};  ///< groups beyond the sixth have no name
};
static_assert(offsetof(FlightHeader, boot_id) == 72);
static_assert(offsetof(FlightHeader, phase) == 248);
static_assert(offsetof(FlightHeader, ending) == 304);
static_assert(offsetof(FlightHeader, start_id) == 728);
static_assert(offsetof(FlightHeader, groups) == 736);
static_assert(sizeof(FlightHeader) == 1024);

struct FlightEntry {
  std::uint64_t version = 0;  ///< 0: never written
  Signature signature;
  std::uint64_t bytes = 0;
  std::int64_t queued_ns = 0;
  std::int64_t started_ns = 0;  ///< 0: no start observed
  std::int64_t ended_ns = 0;    ///< 0: not ended
  std::uint64_t state = 0;      ///< FlightState
  std::uint64_t number = 0;     ///< of the record's collectives, from 0
  std::uint64_t group = 0;      ///< Subgroup::id() of the communicator; 0: all ranks
};
static_assert(sizeof(FlightEntry) == 128 && sizeof(Signature) == 64);
static_assert(std::is_trivially_copyable_v<FlightHeader> &&
              std::is_trivially_copyable_v<FlightEntry>);

/// A record of a larger group counts as corrupt, which bounds a reader's allocations.
inline constexpr std::int32_t kFlightMaxWorldSize = 65'536;

constexpr std::size_t entry_offset(std::size_t i) {
  return sizeof(FlightHeader) + i * sizeof(FlightEntry);
}
inline constexpr std::size_t kFlightBytes = entry_offset(kFlightEntries);

}  // namespace tessera::comm
