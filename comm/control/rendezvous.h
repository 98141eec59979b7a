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
  /// Build and configuration, equal on all ranks; lines "key = value", so that errors name the line
  /// that differs.
  std::string fingerprint;
  /// DeviceBackend::device_id() of its device; empty on the CPU.
  std::string device;

  /// "host, pid 12"
  std::string process() const { return host + ", pid " + std::to_string(pid); }
};

/// This process on this host.
Hello make_hello(int rank, int world_size, std::string run_id, std::string fingerprint,
                 std::string device = {});

/// Key under which a launcher notes the process of a rank ("pid 12"), for ranks that do not come.
std::string started_key(int rank);
/// The name of the ranks' agreement: see find_failure().
inline constexpr const char* kRendezvous = "rendezvous";

/// A hello as text, and back. @throws CommError(Mismatch) if the text is malformed
std::string encode_hello(const Hello& hello);
Hello decode_hello(std::string_view text);

/// All ranks exchange and compare their hellos; returns them by rank. Every rank ends with the same
/// result or the same error.
///
/// @throws InvalidArgument if this rank is not in [0, world_size)
/// @throws CommError Timeout: "rendezvous: 3 of 4 ranks arrived within 30 s, missing: rank 2;
/// arrived: rank 0 (host, pid 12), ..."; PeerLost, before that, if the launcher has seen a rank
/// end: how, and who has arrived; Mismatch: a rank taken twice; or another world size, run or
/// fingerprint, with every field that differs, its values and their ranks: see
/// find_differences()
std::vector<Hello> rendezvous(Store& store, const Hello& hello, std::chrono::milliseconds deadline);

}  // namespace tessera::comm
