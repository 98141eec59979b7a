#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Treatment of differences between a model's tensors and its source's.
enum class LoadPolicy {
  Exact,        ///< all differences are errors
  IgnoreExtra,  ///< tensors that the model lacks are skipped; other differences are errors
  Partial,      ///< as IgnoreExtra, and missing or mismatched tensors keep their initial values
};
/// "exact", "ignore-extra" or "partial". @throws InvalidArgument
LoadPolicy parse_load_policy(std::string_view text);

/// Comparison of a model's tensors with those of a source.
struct TensorComparison {
  std::set<std::string> usable;  ///< names of tensors in both, of one shape, convertible to f32
  /// "wte.weight [50257, 768]"
  std::vector<std::string> missing, unexpected;
  /// "wte.weight is [50257, 768], expected [50304, 768]"
  std::vector<std::string> shapes, dtypes;

  /// Whether a policy accepts it.
  bool allowed(LoadPolicy policy) const;
  /// All differences; each line begins with a line break.
  std::string str() const;
};
TensorComparison compare_tensors(const std::vector<TensorInfo>& expected,
                                 const std::vector<TensorInfo>& found);

/// One sentence for each kind of difference; empty if there is none.
/// @param source  of the found tensors, for messages
/// @param start   values of tensors that are not loaded, for messages: "random starting values"
/// @throws InvalidArgument, with all differences and the policy that would accept them, unless
///         `policy` does
std::vector<std::string> apply_policy(const TensorComparison& comparison, LoadPolicy policy,
                                      const std::string& source, const std::string& start);

}  // namespace tessera::io
