#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "io/checkpoint/save.h"

namespace tessera::io {

/// Thrown by agree() on all ranks if the work of any rank threw a CorruptCheckpoint.
class FoundDamage : public IoError {
 public:
  explicit FoundDamage(const std::string& text) : IoError("{}", text) {}
};

/// Error text on all ranks: "FAILED: rank 1: why; THEN".
struct Failure {
  std::string failed, then;
};

/// Runs this rank's share of the work of a phase and exchanges the outcomes. If the share of any
/// rank throws, all ranks throw, so that none waits for a failed peer.
/// @param phase  the same on all ranks, see SaveCoordinator
/// @return the results of all ranks' shares
/// @throws IoError, the same on all ranks, if any share threw; FoundDamage if any threw a
///         CorruptCheckpoint; CommError from the coordinator
std::vector<std::string> agree(const SaveRequest& request, SaveCoordinator& coordinator,
                               const std::string& phase, const Failure& failure,
                               const std::function<std::string()>& share);

}  // namespace tessera::io
