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

/// A failure reads "NAME: 3 of 4 ranks VERB within 30 s, missing: rank 2".
struct AgreementOptions {
  std::string name;               ///< prefix of its keys; new for each agreement
  std::string verb = "answered";  ///< of ranks that arrived, past tense
  /// Describes a rank's process from its value; if set, failures list the ranks that arrived.
  std::function<std::string(const std::string& value)> describe = {};
  /// Details of a missing rank: "the launcher started it as pid 12"; may be empty.
  std::function<std::string(int rank)> describe_missing = {};
  /// Checks each value as it arrives; an exception ends the agreement for all ranks that wait.
  std::function<void(int rank, const std::string& value)> check = {};
};

/// All ranks return all values, or throw the same error. The first write to the outcome's key
/// decides, so that ranks agree even if a deadline passes as the last value arrives.
std::vector<std::string> agree(Store& store, const AgreementOptions& options, int rank,
                               int world_size, std::string_view value,
                               std::chrono::milliseconds deadline);

/// agree(), then removes the values from the store.
std::vector<std::string> exchange(Store& store, const AgreementOptions& options, int rank,
                                  int world_size, std::string_view value,
                                  std::chrono::milliseconds deadline);

/// Writes `value` unless the key is taken. @return the key's value
std::string set_or_get(Store& store, const std::string& key, std::string_view value);

/// Key of the verdict on the whole run.
inline constexpr const char* kVerdict = "verdict";
/// Publishes the failure of the run: waiting agreements end, and the ranks' heartbeats abort all
/// other waits. The first verdict stands.
/// @return the verdict that stands. @throws CommError if the store is lost
CommError publish_verdict(Store& store, const CommError& error);
/// The same on the store's server, without a connection; does not throw.
CommError publish_verdict(TcpStoreServer& server, const CommError& error);
std::optional<CommError> find_verdict(const TcpStoreServer& server);
/// Waits up to `at_most` for a verdict. @throws CommError if the store is lost
std::optional<CommError> find_verdict(Store& store, std::chrono::milliseconds at_most,
                                      const std::string& key = kVerdict);
/// The failure of the agreement `name`, if it has failed.
std::optional<CommError> find_failure(const TcpStoreServer& server, const std::string& name);

/// Waits for a key, or for a verdict.
/// @throws CommError Timeout at the deadline; the verdict, if it comes first
std::string get_or_verdict(Store& store, const std::string& key,
                           std::chrono::milliseconds deadline);

/// Serialization of a CommError.
std::string encode_error(const CommError& error);
/// @return a Mismatch error if the text is malformed
CommError decode_error(std::string_view text);

}  // namespace tessera::comm
