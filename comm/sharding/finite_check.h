#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/sharding/sharded_model.h"

namespace tessera::comm {

/// NaN and infinite values in the checked part of a parameter.
struct NonFinite {
  std::string parameter;
  std::int64_t count = 0;  ///< non-finite values
  std::int64_t numel = 0;  ///< checked values
  std::string first;       ///< index of the first non-finite value: "[5, 100]"
  std::string value;       ///< "nan", "inf" or "-inf"
};

// Diagnosis of a non-finite step. These functions do not communicate; they wait for the device.

/// Checks this rank's gradients before they are reduced: those of the micro-batch if gradients are
/// scattered, else those of the step so far. Returns the last parameter first, as in backward.
std::vector<NonFinite> non_finite_gradients(const FlatUnit& unit);
/// Checks this rank's segment of the reduced gradients.
std::vector<NonFinite> non_finite_sums(const ShardedModel& model);
/// Checks this rank's master weights. Bf16 weights need memory for the largest parameter in
/// float32.
std::vector<NonFinite> non_finite_weights(ShardedModel& model);

}  // namespace tessera::comm
