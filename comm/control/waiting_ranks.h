#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/control/store.h"

namespace tessera::comm {

/// By rank: for whose data it waits.
using Waits = std::map<int, std::vector<int>>;

/// Two ranks that wait for each other are both there, so what lies between them lets nothing
/// through. Pure.
/// @return who is cut off: the one rank that all such pairs share, if there are several; else all
/// ranks of these pairs; empty: there is no such pair
std::vector<int> find_cut(const Waits& waits);

/// Why a rank waits.
struct WaitCause {
  std::vector<int>
      silent;  ///< it waits, or those do that it waits for, for these, and they for nobody
  std::vector<int> apart;  ///< if there are none: who is cut off, as find_cut() says
};

/// Follows who waits for whom. Pure.
/// @param owing      for whom `rank` waits
/// @param waits_of   for whom another rank waits; nothing: it is not known to wait
WaitCause find_wait_cause(int rank, const std::vector<int>& owing,
                          const std::function<std::optional<std::vector<int>>(int)>& waits_of);

/// What ranks that wait long tell each other over the store, so that whoever gives up can tell a
/// rank that does not come from a connection that is cut. @throws CommError if the store is lost
class WaitingRanks {
 public:
  /// @param name  begins the keys; new for each communicator
  WaitingRanks(std::shared_ptr<Store> store, std::string name, int rank, int world_size);

  /// This rank waits in that collective for these. The last call for a collective stands.
  void tell(std::uint64_t sequence, const std::vector<int>& owing);
  /// It got through.
  void tell_over(std::uint64_t sequence);
  /// For whom a rank waits in that collective, or in the one before or after it: further apart they
  /// never are, and two whose connection broke as one had sent are one apart.
  std::optional<std::vector<int>> of(int rank, std::uint64_t sequence);

 private:
  std::string key(std::uint64_t sequence, int rank) const;

  const std::shared_ptr<Store> store_;
  const std::string name_;
  const int rank_, world_size_;
  std::uint64_t told_ = 0;  // in that collective,
  int times_ = 0;           // so often
};

}  // namespace tessera::comm
