#pragma once

#include <cstddef>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Treatment of differences between the tensors of a model and those it is loaded from.
enum class LoadPolicy {
  Exact,        ///< all differences are errors
  IgnoreExtra,  ///< tensors that the model lacks are skipped; other differences are errors
  Partial,      ///< as IgnoreExtra, and missing or mismatched tensors keep their initial values
};
/// "exact", "ignore-extra" or "partial". @throws InvalidArgument
LoadPolicy parse_load_policy(std::string_view text);

/// Comparison of a model's tensors with those of a source.
struct TensorComparison {
  std::set<std::string> usable;  ///< tensors in both, with equal shapes and convertible to f32
  /// "wte.weight [50257, 768]"
  std::vector<std::string> missing, unexpected;
  /// "wte.weight is [50257, 768], expected [50304, 768]"
  std::vector<std::string> shapes, dtypes;

  /// Whether a policy accepts these differences.
  bool allowed(LoadPolicy policy) const;
  /// The differences; each line begins with a line break.
  /// @param most  at most so many of each kind, and the number of the others
  std::string str(std::size_t most = std::numeric_limits<std::size_t>::max()) const;
};
TensorComparison compare_tensors(const std::vector<TensorInfo>& expected,
                                 const std::vector<TensorInfo>& found);

/// @throws InvalidArgument listing all differences between a model's tensors and those of a source
void match_tensors(const std::vector<TensorInfo>& expected, const std::vector<TensorInfo>& found,
                   const std::string& source);

/// One sentence for each kind of difference; empty if there is none.
/// @param source  name of the loaded directory, for messages
/// @param start   values that tensors keep if not loaded, for messages: "random starting values"
/// @throws InvalidArgument unless `policy` accepts the differences; lists them all and names the
///         policy that would accept them
std::vector<std::string> apply_policy(const TensorComparison& comparison, LoadPolicy policy,
                                      const std::string& source, const std::string& start);

}  // namespace tessera::io
