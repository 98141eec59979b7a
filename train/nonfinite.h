#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "comm/sharding/finite_check.h"

namespace tessera::train {

/// Parameters with NaN or infinite values, for example in their gradients.
struct NonFiniteParameters {
  std::set<std::string> names;  ///< empty if received from another rank
  std::int64_t count = 0;       ///< number of parameters
  comm::NonFinite first;

  void add(const std::vector<comm::NonFinite>& found);
};

/// One rank's findings in a step whose loss or gradient norm is not finite.
struct StepFindings {
  std::string loss;               ///< "nan", "inf" or "-inf"; empty if this rank's part is finite
  NonFiniteParameters gradients;  ///< computed by this rank
  NonFiniteParameters sums;       ///< this rank's shard of the reduced gradients
  NonFiniteParameters weights;    ///< this rank's shard
};

std::string encode(const StepFindings& findings);
/// @throws CommError(Mismatch) on malformed text
StepFindings decode_findings(const std::string& text);

/// "nan", "inf" or "-inf".
std::string non_finite_word(double value);

struct NonFiniteStep {
  std::int64_t step = 0;
  double loss = 0, grad_norm = 0;       ///< at least one is not finite
  bool finite_again = false;            ///< both were finite in the recomputation
  std::span<const StepFindings> ranks;  ///< of the recomputation, by rank
};

/// Sentences that name the culprit and the remedy; equal on all ranks.
std::string describe(const NonFiniteStep& step);

}  // namespace tessera::train
