#pragma once

#include <string>
#include <vector>

#include "core/tensor.h"
#include "core/testing/gradcheck.h"

namespace tessera::test {

/// An operation under test, with one result.
using Operation = testing::Function;

/// Normal random numbers, determined by seed and shape. f64, f32 or bf16.
Tensor random_tensor(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
                     std::uint64_t seed, double scale = 1.0);
std::vector<double> values_of(const Tensor& tensor);
/// A copy in another floating-point dtype, outside of the autograd graph.
Tensor convert(const Tensor& tensor, DType dtype);

/// testing::gradcheck as text: empty on success.
inline std::string gradcheck(const Operation& operation, const std::vector<Tensor>& inputs,
                             const testing::GradcheckOptions& options = {}) {
  const testing::GradcheckResult result = testing::gradcheck(operation, inputs, options);
  return result.ok() ? std::string() : result.str();
}

/// Runs an operation on bf16 inputs and on the same values in f32; compares results and gradients
/// relative to each tensor's largest value.
/// @param inputs  floating-point ones in bf16; others are passed through
/// @return        empty on success, else the tensor that differs
std::string compare_bf16(const Operation& operation, const std::vector<Tensor>& inputs,
                         double tolerance);

}  // namespace tessera::test
