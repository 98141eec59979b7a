#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tessera::test {

/// An operation under test, with one result.
using Operation = std::function<Tensor(const std::vector<Tensor>&)>;

/// Normal random numbers, determined by seed and shape. f64, f32 or bf16.
Tensor random_tensor(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
                     std::uint64_t seed, double scale = 1.0);
std::vector<double> values_of(const Tensor& tensor);
/// A copy in another floating-point dtype, outside of the autograd graph.
Tensor convert(const Tensor& tensor, DType dtype);

struct GradcheckOptions {
  double step = 1e-5;
  double tolerance = 1e-7;   ///< absolute, and relative to the larger value
  bool leaves_only = false;  ///< the operation needs leaf inputs: skip the check on non-leaves
};

/// Compares the gradients of every f64 leaf that requires one with central differences of a fixed
/// random combination of the results. Repeats the check with accumulated gradients, and with
/// non-leaf inputs that are used twice.
/// @return  empty on success, else input, element and both values
std::string gradcheck(const Operation& operation, const std::vector<Tensor>& inputs,
                      const GradcheckOptions& options = {});

/// Runs an operation on bf16 inputs and on the same values in f32; compares results and gradients
/// relative to each tensor's largest value.
/// @param inputs  floating-point ones in bf16; others are passed through
/// @return        empty on success, else the tensor that differs
std::string compare_bf16(const Operation& operation, const std::vector<Tensor>& inputs,
                         double tolerance);

}  // namespace tessera::test
