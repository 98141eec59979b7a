#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/control/store.h"
#include "core/base/error.h"

namespace tessera::comm {

class TcpStoreServer;

/// How an agreement words its failure: "<name>: 3 of 4 ranks <arrived> within 30 s, missing: rank
/// 2".
struct AgreementOptions {
  std::string name;               ///< prefix of its keys; new for each agreement
  std::string verb = "answered";  ///< what the ranks did
  /// Who a rank is, from its value: failures then also tell who did come, by this.
  std::function<std::string(const std::string& value)> describe;
  /// What is known of a rank that did not come, for failures: "the launcher started it as pid 12",
  /// or nothing.
  std::function<std::string(int rank)> describe_missing;
  /// Looks at one rank's value as it comes; what it throws ends the agreement for this rank and
  /// every one that is still waiting.
  std::function<void(int rank, const std::string& value)> check;
};

/// The body of exchange() and rendezvous(): all ranks end with all values, or all with the same
/// error. Success or failure is decided by who first writes one key, so a rank whose deadline
/// passes while the last value comes in can't disagree with the others.
std::vector<std::string> agree(Store& store, const AgreementOptions& options, int rank,
                               int world_size, std::string_view value,
                               std::chrono::milliseconds deadline);

/// Writes `value` unless the key is taken; returns what stands there.
std::string set_or_get(Store& store, const std::string& key, std::string_view value);

/// Tells every rank why the run has failed: agreements that wait end with the verdict soon, instead
/// of at their deadlines, and so does what Heartbeat ends. The first call stands.
/// @return what stands. @throws CommError if the store is lost
CommError publish_verdict(Store& store, const CommError& error);
/// The same for who serves the store: it does not have to connect, and nothing is thrown.
CommError publish_verdict(TcpStoreServer& server, const CommError& error);
std::optional<CommError> find_verdict(const TcpStoreServer& server);
/// How an agreement failed; nothing if it did not, or has not ended.
std::optional<CommError> find_failure(const TcpStoreServer& server, const std::string& name);
/// Waits at most so long for somebody's verdict. @throws CommError if the store is lost
std::optional<CommError> find_verdict(Store& store, std::chrono::milliseconds at_most);
/// Where verdicts on the whole run are.
inline constexpr const char* kVerdict = "verdict";

/// Waits for a key, but no longer than for a verdict.
/// @throws CommError Timeout at the deadline; the verdict, if there is one first
std::string get_or_verdict(Store& store, const std::string& key,
                           std::chrono::milliseconds deadline);

/// A CommError as text and back, for passing one verdict to all ranks.
std::string encode_error(const CommError& error);
/// @return a Mismatch that says so if the text is none
CommError decode_error(std::string_view text);

}  // namespace tessera::comm
