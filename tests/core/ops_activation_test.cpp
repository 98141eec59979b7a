#include <doctest/doctest.h>

#include <cmath>
#include <numbers>

#include "core/autograd/autograd.h"
#include "core/ops/activation.h"
#include "tests/support/gradcheck.h"

namespace tessera {
namespace {

using testing::random_tensor;

TEST_CASE("gelu: its formula, and the ends of the range") {
  const auto context = Context::create();
  const std::vector<double> values{-30, -3, -1, -1e-3, 0, 1e-3, 0.5, 2, 30};
  const Tensor y = ops::gelu(Tensor::from<double>(context, {9}, values));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = values[i];
    const double inner = std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x);
    CHECK(y.data<double>()[i] == doctest::Approx(0.5 * x * (1.0 + std::tanh(inner))).epsilon(1e-9));
  }
}

TEST_CASE("gelu: gradients") {
  const auto context = Context::create();
  for (const Shape& shape : {Shape{1}, Shape{17}, Shape{3, 5}, Shape{2, 3, 7}}) {
    Tensor x = random_tensor(context, shape, DType::F64, 1, 2.0).set_requires_grad(true);
    CHECK(testing::gradcheck([](const auto& t) { return ops::gelu(t[0]); }, {x}) == "");
  }
}

TEST_CASE("gelu: bf16 is near f32") {
  const auto context = Context::create();
  CHECK(testing::compare_bf16([](const auto& t) { return ops::gelu(t[0]); },
                              {random_tensor(context, {5, 33}, DType::BF16, 1)}, 0.01) == "");
}

TEST_CASE("gelu: its input changed in place before backward is noticed") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {1}, DType::F32, 1).set_requires_grad(true);
  const Tensor y = ops::gelu(x);
  x.storage()->bump_version();
  CHECK_THROWS_WITH_AS(autograd::backward(y), doctest::Contains("gelu"), InternalError);
}

TEST_CASE("gelu: what it refuses") {
  const auto context = Context::create();
  CHECK_THROWS_WITH_AS(ops::gelu(Tensor::empty(context, {2}, DType::F16)),
                       doctest::Contains("gelu: x must be f64, f32 or bf16, got f16"),
                       InvalidArgument);
  const Tensor x = random_tensor(context, {2, 3}, DType::F32, 1);
  CHECK_THROWS_WITH_AS(ops::gelu(x.alias({3, 2}, {1, 3}, 0)), doctest::Contains("[1, 3]"),
                       InvalidArgument);
}

}  // namespace
}  // namespace tessera
