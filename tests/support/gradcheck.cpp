#include "tests/support/gradcheck.h"

#include <algorithm>
#include <cmath>

#include "core/autograd/autograd.h"
#include "core/base/rng.h"

namespace tessera::test {
namespace {

// Weights of the checked linear combination; 1 for a scalar result.
Tensor combination(const Tensor& y) {
  return y.numel() == 1 ? Tensor::full(y.context(), y.shape(), y.dtype(), 1.0)
                        : random_tensor(y.context(), y.shape(), y.dtype(), 4711);
}

}  // namespace

Tensor random_tensor(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
                     std::uint64_t seed, double scale) {
  const RngKey key = RngKey::make(seed, RngPurpose::Test, 0);
  std::vector<double> values(static_cast<std::size_t>(numel(shape)));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = scale * static_cast<double>(normal_at(key, i));
  return convert(Tensor::from<double>(context, shape, values), dtype);
}

std::vector<double> values_of(const Tensor& tensor) {
  return visit_floating(tensor.dtype(), "values_of", [&]<typename T>(std::type_identity<T>) {
    std::vector<double> result;
    for (const T value : tensor.to_vector<T>()) {
      if constexpr (std::is_same_v<T, double>)
        result.push_back(value);
      else
        result.push_back(static_cast<double>(static_cast<float>(value)));
    }
    return result;
  });
}

Tensor convert(const Tensor& tensor, DType dtype) {
  const std::vector<double> values = values_of(tensor);
  return visit_floating(dtype, "convert", [&]<typename T>(std::type_identity<T>) {
    std::vector<T> result;
    for (const double value : values) {
      if constexpr (std::is_same_v<T, double>)
        result.push_back(value);
      else
        result.push_back(static_cast<T>(static_cast<float>(value)));
    }
    return Tensor::from<T>(tensor.context(), tensor.shape(), result);
  });
}

std::string compare_bf16(const Operation& operation, const std::vector<Tensor>& inputs,
                         double tolerance) {
  const auto differs = [&](const Tensor& narrow, const Tensor& wide, const std::string& what) {
    const std::vector<double> a = values_of(narrow), b = values_of(wide);
    double largest = 0.0, error = 0.0;
    for (std::size_t i = 0; i < b.size(); ++i) {
      largest = std::max(largest, std::abs(b[i]));
      const double difference = std::abs(a[i] - b[i]);
      error = difference <= error ? error : difference;  // a NaN persists
    }
    return error <= tolerance * largest
               ? std::string()
               : fmt::format("{} differs by {}, its largest value is {}", what, error, largest);
  };

  std::vector<Tensor> narrow, wide;
  for (const Tensor& input : inputs) {
    const bool floating = is_floating(input.dtype());
    narrow.push_back(input.detach());
    wide.push_back(floating ? convert(input, DType::F32) : input);
    if (!floating) continue;
    narrow.back().set_requires_grad(true);
    wide.back().set_requires_grad(true);
  }
  const Tensor y_narrow = operation(narrow), y_wide = operation(wide);
  std::string message = differs(y_narrow, y_wide, "result");
  if (!message.empty()) return message;
  const Tensor grad = convert(combination(y_wide), DType::BF16);
  autograd::backward(y_narrow, convert(grad, y_narrow.dtype()));
  autograd::backward(y_wide, convert(grad, DType::F32));
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    if (!narrow[k].requires_grad()) continue;
    message = differs(narrow[k].grad(), wide[k].grad(), fmt::format("gradient of input {}", k));
    if (!message.empty()) return message;
  }
  return {};
}

}  // namespace tessera::test
