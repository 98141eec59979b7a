#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tessera::testing {

/// An operation under test: one result from a list of inputs.
using Operation = std::function<Tensor(const std::vector<Tensor>&)>;

/// Normal random numbers, the same for the same seed and shape. f64, f32 or bf16.
Tensor random_tensor(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
                     std::uint64_t seed, double scale = 1.0);
/// The contents of a contiguous floating tensor as double.
std::vector<double> values_of(const Tensor& tensor);
/// A copy in another floating dtype, outside of the graph.
Tensor convert(const Tensor& tensor, DType dtype);

struct GradcheckOptions {
  double step = 1e-5;
  double tolerance = 1e-7;   ///< absolute, and relative to the larger value
  bool leaves_only = false;  ///< the operation wants leaves: leave out the check on results
};

/// Compares the gradients of every input that requires one (f64 leaves) with central differences of
/// a fixed random combination of the results. Then again with gradients that are added to those of
/// a former pass, and with inputs that are results of other operations and are used twice.
/// @return  empty if all agree, else which element of which input, and both values
std::string gradcheck(const Operation& operation, const std::vector<Tensor>& inputs,
                      const GradcheckOptions& options = {});

/// Runs an operation on bf16 inputs and on the same values in f32 and compares results and
/// gradients, relative to the largest value of each.
/// @param inputs  floating ones in bf16; others are handed through
/// @return        empty if all agree, else what does not
std::string compare_bf16(const Operation& operation, const std::vector<Tensor>& inputs,
                         double tolerance);

}  // namespace tessera::testing
