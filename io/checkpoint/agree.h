#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "io/checkpoint/save.h"

namespace tessera::io {

/// A rank's share threw a CorruptCheckpoint.
class FoundDamage : public IoError {
 public:
  explicit FoundDamage(const std::string& text) : IoError("{}", text) {}
};

/// Message on all ranks if one failed: "FAILED: rank 1: why; THEN".
struct Failure {
  std::string failed, then;
};

/// Runs this rank's share of a phase and exchanges the outcome. An exception of the share is sent
/// to all ranks before it is thrown, so that no peer waits for a rank that has given up.
/// @param phase  the same on all ranks, see SaveCoordinator
/// @return the results of all ranks' shares
/// @throws IoError, the same on all ranks, if any share threw, FoundDamage if any of them threw a
///         CorruptCheckpoint, whatever the others threw; CommError of the coordinator
std::vector<std::string> agree(const SaveRequest& request, SaveCoordinator& coordinator,
                               const std::string& phase, const Failure& failure,
                               const std::function<std::string()>& share);

}  // namespace tessera::io
