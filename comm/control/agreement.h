#pragma once

#include <functional>
#include <string>

#include "comm/control/store.h"
#include "core/base/error.h"

namespace tessera::comm {

/// How an agreement words its failure: "<name>: 3 of 4 ranks <arrived> within 30 s, missing: rank
/// 2".
struct AgreementOptions {
  std::string name;               ///< prefix of its keys; new for each agreement
  std::string verb = "answered";  ///< what the ranks did
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

/// Tells every rank that a rank has ended before its time: agreements that wait end with `error`
/// soon, instead of at their deadlines. Who watches the ranks' processes calls it; the first call
/// stands. @throws CommError if the store is lost
void tell_of_lost_rank(Store& store, const CommError& error);

/// A CommError as text and back, for passing one verdict to all ranks.
std::string encode_error(const CommError& error);
/// @throws CommError(Mismatch) if the text is none
CommError decode_error(std::string_view text);

}  // namespace tessera::comm
