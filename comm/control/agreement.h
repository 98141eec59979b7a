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

/// Words of an agreement's failure: "NAME: 3 of 4 ranks VERB within 30 s, missing: rank 2".
struct AgreementOptions {
  std::string name;               ///< prefix of its keys; new for each agreement
  std::string verb = "answered";  ///< what the ranks did
  /// Describes a rank's process from its value; failures then list the ranks that came.
  std::function<std::string(const std::string& value)> describe;
  /// What is known of a rank that did not come: "the launcher started it as pid 12", or nothing.
  std::function<std::string(int rank)> describe_missing;
  /// Checks each value as it arrives; an exception ends the agreement for all ranks that wait.
  std::function<void(int rank, const std::string& value)> check;
};

/// The body of exchange() and rendezvous(): all ranks return all values, or throw the same error.
/// The first write to one key decides, so a rank whose deadline passes as the last value arrives
/// can't disagree with the others.
std::vector<std::string> agree(Store& store, const AgreementOptions& options, int rank,
                               int world_size, std::string_view value,
                               std::chrono::milliseconds deadline);

/// Writes `value` unless the key is taken. @return the key's value
std::string set_or_get(Store& store, const std::string& key, std::string_view value);

/// Key of the verdict on the whole run.
inline constexpr const char* kVerdict = "verdict";
/// Publishes why the run has failed: it ends agreements that wait, and the ranks' heartbeats abort
/// what else waits. The first verdict stands.
/// @return the verdict that stands. @throws CommError if the store is lost
CommError publish_verdict(Store& store, const CommError& error);
/// The same for the process that serves the store, without a connection; does not throw.
CommError publish_verdict(TcpStoreServer& server, const CommError& error);
std::optional<CommError> find_verdict(const TcpStoreServer& server);
/// Waits for a verdict, at most so long. @throws CommError if the store is lost
std::optional<CommError> find_verdict(Store& store, std::chrono::milliseconds at_most);
/// The failure of the agreement `name`, if it has failed.
std::optional<CommError> find_failure(const TcpStoreServer& server, const std::string& name);

/// Waits for a key, or for a verdict.
/// @throws CommError Timeout at the deadline; the verdict, if it comes first
std::string get_or_verdict(Store& store, const std::string& key,
                           std::chrono::milliseconds deadline);

/// A CommError as text, and back.
std::string encode_error(const CommError& error);
/// @return a Mismatch that says so if the text is malformed
CommError decode_error(std::string_view text);

}  // namespace tessera::comm
