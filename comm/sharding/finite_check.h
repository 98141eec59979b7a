#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/sharding/sharded_model.h"

namespace tessera::comm {

/// Values of one parameter, or of the part of it that was looked at, that are NaN or infinite.
struct NonFinite {
  std::string parameter;
  std::int64_t count = 0;  ///< of them
  std::int64_t numel = 0;  ///< of the values that were looked at
  std::string first;       ///< where the first of them is in the parameter: "[5, 100]"
  std::string value;       ///< of the first: "nan", "inf" or "-inf"
};

// For finding who spoiled a step: each waits for the device, and reads what is not finite to the
// host. Nothing is sent; ranks may call them for themselves.

/// In the gradients that this rank has in the unit's buffer, before they are reduced: of a
/// micro-batch if they are scattered, else of the step so far. The last parameter, of which
/// backward computes the gradient first, comes first.
std::vector<NonFinite> non_finite_gradients(Context& context, const FlatUnit& unit);
/// In what this rank holds of the sums over ranks and micro-batches, once they are reduced.
std::vector<NonFinite> non_finite_sums(Context& context, const ShardedModel& model);
/// In this rank's master weights. Takes room for the largest parameter in float32 if they are bf16.
std::vector<NonFinite> non_finite_weights(Context& context, ShardedModel& model);

}  // namespace tessera::comm
