#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "comm/sharding/finite_check.h"

namespace tessera::tools {

/// Parameters in one place of a step (its gradients, say) that hold NaN or infinite values.
struct NonFiniteParameters {
  std::set<std::string> names;
  comm::NonFinite first;  ///< of the one that was found first

  void add(const std::vector<comm::NonFinite>& found);
};

/// What one rank finds in a step whose loss or gradient norm is not finite.
struct StepFindings {
  std::string loss;               ///< this rank's part, if it is not finite: "nan", "inf", "-inf"
  NonFiniteParameters gradients;  ///< that this rank has computed
  NonFiniteParameters sums;       ///< that it holds of all ranks' gradients
  NonFiniteParameters weights;    ///< that it holds
};

/// The findings as text and back, for telling other ranks.
std::string encode(const StepFindings& findings);
/// @throws CommError(Mismatch) if the text is none
StepFindings decode_findings(const std::string& text);

/// "nan", "inf" or "-inf"; the sign of a NaN tells nobody anything.
std::string non_finite_word(double value);

struct NonFiniteStep {
  std::int64_t step = 0;
  double loss = 0, grad_norm = 0;       ///< of which one is not finite
  bool finite_again = false;            ///< both were, when computed again
  std::span<const StepFindings> ranks;  ///< from computing it again, by rank
};

/// One sentence that names what is to blame, and what to do, the same on every rank that has the
/// same findings.
std::string describe(const NonFiniteStep& step);

}  // namespace tessera::tools
