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

/// Options of agree(). A failure reads "NAME: 3 of 4 ranks VERB within 30 s, missing: rank 2".
struct AgreementOptions {
  std::string name;               ///< prefix of the store keys; unique to each agreement
  std::string verb = "answered";  ///< past tense, for the ranks that arrived
  /// Describes a rank's process from its value; if set, failures list the ranks that arrived.
  std::function<std::string(const std::string& value)> describe = {};
  /// Details of a missing rank: "the launcher started it as pid 12"; may be empty.
  std::function<std::string(int rank)> describe_missing = {};
  /// Checks each value as it arrives; an exception ends the agreement for all ranks that wait.
  std::function<void(int rank, const std::string& value)> check = {};
  /// World rank of each rank, for messages and culprits; empty: the same.
  std::vector<int> world_ranks = {};
  /// Key of an error that ends the agreement; see FailureReport.
  std::string verdict = "verdict";
};

/// Publishes `value` and waits for the others. Either all ranks return all values, by rank, or all
/// throw the same error. One key of the store holds the outcome and its first write wins, so that a
/// deadline that passes as the last value arrives can't divide the ranks.
std::vector<std::string> agree(Store& store, const AgreementOptions& options, int rank,
                               int world_size, std::string_view value,
                               std::chrono::milliseconds deadline);

/// Calls agree(), then removes the values from the store.
std::vector<std::string> exchange(Store& store, const AgreementOptions& options, int rank,
                                  int world_size, std::string_view value,
                                  std::chrono::milliseconds deadline);

/// Value of a key; nothing if it is not set within `at_most`.
/// @throws CommError if the store is lost
std::optional<std::string> get_if_set(Store& store, const std::string& key,
                                      std::chrono::milliseconds at_most);
/// Writes `value` unless the key is taken. @return the key's value
std::string set_or_get(Store& store, const std::string& key, std::string_view value);

/// Store key of the run's verdict: the error that ends the run, the same on all ranks.
inline constexpr const char* kVerdict = "verdict";
/// Publishes `error` as the verdict unless there is one already. Waiting agreements then end, and
/// the heartbeats of all ranks abort all other waits.
/// @return the verdict. @throws CommError if the store is lost
CommError publish_verdict(Store& store, const CommError& error);
/// The same in the server's process; needs no connection and does not throw.
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

std::string encode_error(const CommError& error);
/// @return a Mismatch error if the text is malformed
CommError decode_error(std::string_view text);

}  // namespace tessera::comm
