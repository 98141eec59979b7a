#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tessera::testing {

/// A function under test: results from inputs alone, and the same ones in every call.
using Function = std::function<Tensor(const std::vector<Tensor>&)>;

struct GradcheckOptions {
  double step = 1e-5;       ///< of the central differences
  double tolerance = 1e-7;  ///< absolute, and relative to the larger value
  /// The function needs leaves: skip the check with inputs that are results of other operations.
  bool leaves_only = false;
};

/// The element with the largest error, of all inputs and passes.
struct GradcheckResult {
  double error = 0.0;         ///< in units of the tolerance
  int input = -1;             ///< -1: no input requires a gradient
  std::int64_t element = -1;  ///< row-major; -1: the input got no gradient
  double gradient = 0.0;      ///< by backward
  double expected = 0.0;      ///< by differences
  std::string_view pass;      ///< "one backward", "two backwards", "used twice"

  bool ok() const { return error <= 1.0; }
  explicit operator bool() const { return ok(); }
  /// A sentence naming input, element and both values.
  std::string str() const;
};

std::ostream& operator<<(std::ostream& out, const GradcheckResult& result);

/// Compares the gradients of every input that requires one with central differences of a fixed
/// random combination of the function's results: after one backward; after a second one, whose
/// gradients accumulate; and for the sum of two calls on inputs that are not leaves.
///
///     Tensor w = Tensor::from(context, {{1, 2}, {3, 4}}, DType::F64).set_requires_grad(true);
///     const auto f = [](const std::vector<Tensor>& t) { return t[0] * t[0]; };
///     CHECK(testing::gradcheck(f, {w}));
///
/// Discards the inputs' gradients. Changes their elements one at a time and restores them, which
/// counts as an in-place change. Calls the function twice per element.
/// @param inputs  leaves of one context, on a CPU or a GPU; those that require a gradient are f64
///   and contiguous
/// @throws InvalidArgument on other inputs
GradcheckResult gradcheck(const Function& function, const std::vector<Tensor>& inputs,
                          const GradcheckOptions& options = {});

}  // namespace tessera::testing

template <>
struct fmt::formatter<tessera::testing::GradcheckResult> : fmt::formatter<std::string> {
  fmt::format_context::iterator format(const tessera::testing::GradcheckResult& result,
                                       fmt::format_context& ctx) const;
};
