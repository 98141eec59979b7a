#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "comm/sharding/finite_check.h"

namespace tessera::tools {

/// Parameters with NaN or infinite values in one stage of a step, such as its gradients.
struct NonFiniteParameters {
  std::set<std::string> names;
  comm::NonFinite first;  ///< of the one that was found first

  void add(const std::vector<comm::NonFinite>& found);
};

/// One rank's findings in a step whose loss or gradient norm is not finite.
struct StepFindings {
  std::string loss;               ///< this rank's part, if it is not finite: "nan", "inf", "-inf"
  NonFiniteParameters gradients;  ///< that this rank has computed
  NonFiniteParameters sums;       ///< that it holds of all ranks' gradients
  NonFiniteParameters weights;    ///< that it holds
};

/// Serialization of the findings, to exchange them among ranks.
std::string encode(const StepFindings& findings);
/// @throws CommError(Mismatch) on malformed text
StepFindings decode_findings(const std::string& text);

/// "nan", regardless of its sign, "inf" or "-inf".
std::string non_finite_word(double value);

struct NonFiniteStep {
  std::int64_t step = 0;
  double loss = 0, grad_norm = 0;       ///< of which one is not finite
  bool finite_again = false;            ///< both were, when computed again
  std::span<const StepFindings> ranks;  ///< from computing it again, by rank
};

/// One sentence that names the culprit and what to do; a pure function of the findings.
std::string describe(const NonFiniteStep& step);

}  // namespace tessera::tools
