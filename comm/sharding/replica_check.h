#pragma once

#include "comm/sharding/sharded_model.h"
#include "core/base/error.h"

namespace tessera::comm {

/// Replicas of weights or optimizer state are not the same bits.
class ReplicaMismatch : public Error {
 public:
  using Error::Error;
};

/// Compares replicated state: masters and optimizer state of the ranks of
/// model.mesh().replicate(), and frozen parameters that stay whole on all ranks. Hashes them on the
/// device and gathers 8 bytes per parameter and rank; no-op without replicas. Call it on all ranks,
/// between steps. The host waits for the device.
/// @throws ReplicaMismatch on all ranks, naming the first parameter that differs, and the ranks
///   that differ from the majority or, without one, from the lowest rank; CommError
void check_replicas(ShardedModel& model);

}  // namespace tessera::comm
