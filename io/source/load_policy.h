#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Treatment of tensors that only the model or only its source has.
enum class LoadPolicy {
  Exact,        ///< an error
  IgnoreExtra,  ///< tensors that the model lacks are skipped; other differences are errors
  Partial,      ///< also, missing or mismatched tensors keep their starting values
};
/// "exact", "ignore-extra" or "partial". @throws InvalidArgument
LoadPolicy parse_load_policy(std::string_view text);

/// Comparison of a model's tensors with those of a source.
struct TensorComparison {
  std::set<std::string> usable;  ///< names; in both, of one shape, and convertible to f32
  /// "wte.weight [50257, 768]"
  std::vector<std::string> missing, unexpected;
  /// "wte.weight is [50257, 768], expected [50304, 768]"
  std::vector<std::string> shapes, dtypes;

  /// Whether a policy accepts it.
  bool allowed(LoadPolicy policy) const;
  /// All differences, each on a line of its own after a line break.
  std::string str() const;
};
TensorComparison compare_tensors(const std::vector<TensorInfo>& expected,
                                 const std::vector<TensorInfo>& found);

/// One sentence for each kind of skipped tensors; empty if there is no difference.
/// @param source  that the tensors were found in
/// @param start   values of tensors that are not loaded: "random starting values"
/// @throws InvalidArgument listing all differences and the policies that would accept them, unless
///         the policy does
std::vector<std::string> apply_policy(const TensorComparison& comparison, LoadPolicy policy,
                                      const std::string& source, const std::string& start);

}  // namespace tessera::io
