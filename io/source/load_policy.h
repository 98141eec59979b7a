#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/pump/tensor_source.h"

namespace tessera::io {

/// What to make of tensors that a model has and its source has not, or the other way round.
enum class LoadPolicy {
  Exact,        ///< an error
  IgnoreExtra,  ///< what the model does not have is left out; the rest is an error
  Partial,      ///< what is missing or does not fit keeps its starting value, too
};
/// "exact", "ignore-extra" or "partial". @throws InvalidArgument
LoadPolicy parse_load_policy(std::string_view text);

/// A model's tensors beside those of a source.
struct TensorComparison {
  std::set<std::string> usable;  ///< names; in both, of one shape, and convertible to f32
  /// "wte.weight [50257, 768]"
  std::vector<std::string> missing, unexpected;
  /// "wte.weight is [50257, 768], expected [50304, 768]"
  std::vector<std::string> shapes, dtypes;

  /// Whether a policy makes do with it.
  bool allowed(LoadPolicy policy) const;
  /// All of them, in lines of their own, each after a line break.
  std::string str() const;
};
TensorComparison compare_tensors(const std::vector<TensorInfo>& expected,
                                 const std::vector<TensorInfo>& found);

/// One sentence for each kind of tensors that are left out; empty if the two are the same.
/// @param source  that the tensors were found in
/// @param start   what those keep that are not loaded: "random starting values"
/// @throws InvalidArgument that lists all differences at once and names the policies that would do,
///         unless the policy allows them
std::vector<std::string> apply_policy(const TensorComparison& comparison, LoadPolicy policy,
                                      const std::string& source, const std::string& start);

}  // namespace tessera::io
