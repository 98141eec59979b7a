#include "core/testing/gradcheck.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>

#include "core/autograd/autograd.h"
#include "core/base/rng.h"
#include "core/ops/elementwise.h"
#include "core/ops/view.h"

namespace tessera::testing {
namespace {

using Values = std::vector<double>;

// Weights of the checked linear combination; 1 for a scalar result.
Values weights_of(const Tensor& y) {
  Values weights(static_cast<std::size_t>(y.numel()), 1.0);
  if (weights.size() == 1) return weights;
  const RngKey key = RngKey::make(4711, RngPurpose::Test, 0);
  for (std::size_t i = 0; i < weights.size(); ++i)
    weights[i] = static_cast<double>(normal_at(key, i));
  return weights;
}

double combined(const Function& function, const std::vector<Tensor>& inputs) {
  const NoGradGuard off(*inputs.front().context());
  const Tensor y = function(inputs);
  const Values values = y.to_vector<double>(), weights = weights_of(y);
  double sum = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) sum += values[i] * weights[i];
  return sum;
}

Values central_differences(const Function& function, const std::vector<Tensor>& inputs,
                           const Tensor& input, double step) {
  const Values before = input.to_vector<double>();
  Values gradient(before.size());
  const auto at = [&](std::size_t i, double value) {
    Values moved = before;
    moved[i] = value;
    input.copy_from_host(moved.data());
    return combined(function, inputs);
  };
  for (std::size_t i = 0; i < gradient.size(); ++i)
    gradient[i] = (at(i, before[i] + step) - at(i, before[i] - step)) / (2.0 * step);
  input.copy_from_host(before.data());
  input.storage()->bump_version();
  return gradient;
}

class Check {
 public:
  Check(const std::vector<Tensor>& inputs, const GradcheckOptions& options)
      : inputs_(inputs), options_(options) {}

  /// Compares the gradients of inputs with `factor` times the expected ones.
  void compare(const std::vector<Values>& expected, double factor, std::string_view pass) {
    for (std::size_t k = 0; k < inputs_.size(); ++k) {
      if (!inputs_[k].requires_grad()) continue;
      if (!inputs_[k].grad().defined()) {
        note({kInfinite, static_cast<int>(k), -1, 0.0, 0.0, pass});
        continue;
      }
      const Values found = inputs_[k].grad().to_vector<double>();
      for (std::size_t i = 0; i < found.size(); ++i) {
        const double wanted = factor * expected[k][i];
        const double scale = std::max({1.0, std::abs(wanted), std::abs(found[i])});
        const double error = std::abs(found[i] - wanted) / (options_.tolerance * scale);
        note({std::isnan(error) ? kInfinite : error, static_cast<int>(k),
              static_cast<std::int64_t>(i), found[i], wanted, pass});
      }
    }
  }
  const GradcheckResult& result() const { return result_; }

 private:
  static constexpr double kInfinite = std::numeric_limits<double>::infinity();

  void note(const GradcheckResult& element) {
    if (result_.input < 0 || element.error > result_.error) result_ = element;
  }

  const std::vector<Tensor>& inputs_;
  const GradcheckOptions& options_;
  GradcheckResult result_;
};

void check_inputs(const std::vector<Tensor>& inputs) {
  require(!inputs.empty(), "gradcheck: needs inputs, got none");
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    const Tensor& input = inputs[k];
    if (!input.requires_grad()) continue;
    require(input.is_leaf() && input.dtype() == DType::F64 && input.is_contiguous(),
            "gradcheck: input {} must be a contiguous f64 leaf, got {} {} with strides {}", k,
            input.shape(), input.dtype(), input.strides());
  }
}

}  // namespace

std::string GradcheckResult::str() const {
  if (input < 0) return "no input requires a gradient";
  if (element < 0) return fmt::format("{}: input {} got no gradient", pass, input);
  return fmt::format(
      "{}: gradient of input {} at element {} is {}, differences give {} ({}error "
      "{:.3g} times the tolerance)",
      pass, input, element, gradient, expected, ok() ? "ok, largest " : "", error);
}

std::ostream& operator<<(std::ostream& out, const GradcheckResult& result) {
  return out << result.str();
}

GradcheckResult gradcheck(const Function& function, const std::vector<Tensor>& inputs,
                          const GradcheckOptions& options) {
  check_inputs(inputs);
  std::vector<Values> expected(inputs.size());
  for (std::size_t k = 0; k < inputs.size(); ++k)
    if (inputs[k].requires_grad())
      expected[k] = central_differences(function, inputs, inputs[k], options.step);

  const auto backward = [](const Tensor& y) {
    autograd::backward(y, Tensor::from<double>(y.context(), y.shape(), weights_of(y)));
  };
  const auto discard = [&] {
    for (Tensor input : inputs) input.zero_grad();
  };
  Check check(inputs, options);
  discard();
  backward(function(inputs));
  check.compare(expected, 1.0, "one backward");
  if (!check.result().ok()) return check.result();
  backward(function(inputs));
  check.compare(expected, 2.0, "two backwards");
  if (!check.result().ok()) return check.result();

  discard();
  std::vector<Tensor> used = inputs;
  if (!options.leaves_only)
    for (Tensor& input : used)
      if (input.requires_grad()) input = ops::reshape(input, input.shape());
  const Tensor first = function(used), second = function(used);
  backward(ops::add(first, second));
  check.compare(expected, 2.0, "used twice");
  return check.result();
}

}  // namespace tessera::testing

fmt::format_context::iterator fmt::formatter<tessera::testing::GradcheckResult>::format(
    const tessera::testing::GradcheckResult& result, fmt::format_context& ctx) const {
  return fmt::formatter<std::string>::format(result.str(), ctx);
}
