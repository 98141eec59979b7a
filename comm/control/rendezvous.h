#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/control/store.h"

namespace tessera::comm {

/// A rank's introduction to the others.
struct Hello {
  int rank = 0;
  int world_size = 1;
  std::string host;
  int pid = 0;
  std::string run_id;
  /// Build and configuration as lines "key = value", equal on all ranks; errors name the lines that
  /// differ.
  std::string fingerprint;
  /// DeviceBackend::device_id() of the rank's device; empty on the CPU.
  std::string device;

  /// "host, pid 12"
  std::string process() const { return host + ", pid " + std::to_string(pid); }
};

/// Fills in host and pid of this process.
Hello make_hello(int rank, int world_size, std::string run_id, std::string fingerprint,
                 std::string device = {});

/// Key under which a launcher publishes a rank's process ("pid 12"), for errors about missing
/// ranks.
std::string started_key(int rank);
/// Name of rendezvous()'s agreement, for find_failure().
inline constexpr const char* kRendezvous = "rendezvous";

/// Serialization. @throws CommError(Mismatch) if the text is malformed
std::string encode_hello(const Hello& hello);
Hello decode_hello(std::string_view text);

/// Exchanges the hellos of all ranks, compares them, and returns them by rank. Every rank gets the
/// same result or error.
///
/// @throws InvalidArgument if this rank is not in [0, world_size)
/// @throws CommError Timeout: "rendezvous: 3 of 4 ranks arrived within 30 s, missing: rank 2;
///   arrived: rank 0 (host, pid 12), ..."; PeerLost, earlier, if the launcher has seen a rank end;
///   Mismatch if two processes have the same rank, or if world size, run id or fingerprint differ:
///   see find_differences()
std::vector<Hello> rendezvous(Store& store, const Hello& hello, std::chrono::milliseconds deadline);

}  // namespace tessera::comm
