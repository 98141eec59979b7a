#include <doctest/doctest.h>

#include <cmath>
#include <numbers>

#include "core/autograd/autograd.h"
#include "core/ops/activation.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

TEST_CASE("gelu: gradients") {
  const auto context = Context::create();
  for (const Shape& shape : {Shape{1}, Shape{17}, Shape{3, 5}, Shape{2, 3, 7}}) {
    Tensor x = random_tensor(context, shape, DType::F64, 1, 2.0).set_requires_grad(true);
    CHECK(gradcheck([](const auto& t) { return ops::gelu(t[0]); }, {x}) == "");
  }
}

TEST_CASE("gelu: bf16 matches f32") {
  const auto context = Context::create();
  CHECK(compare_bf16([](const auto& t) { return ops::gelu(t[0]); },
                     {random_tensor(context, {5, 33}, DType::BF16, 1)}, 0.01) == "");
}

TEST_CASE("gelu: in-place modification of its input before backward is detected") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {1}, DType::F32, 1).set_requires_grad(true);
  const Tensor y = ops::gelu(x);
  x.storage()->bump_version();
  CHECK_THROWS_WITH_AS(autograd::backward(y), doctest::Contains("gelu"), InvalidArgument);
}

TEST_CASE("gelu: refuses invalid arguments") {
  const auto context = Context::create();
  CHECK_THROWS_WITH_AS(ops::gelu(Tensor::empty(context, {2}, DType::F16)),
                       doctest::Contains("gelu: x must be f64, f32 or bf16, got f16"),
                       InvalidArgument);
  const Tensor x = random_tensor(context, {2, 3}, DType::F32, 1);
  CHECK_THROWS_WITH_AS(ops::gelu(x.alias({3, 2}, {1, 3}, 0)), doctest::Contains("[1, 3]"),
                       InvalidArgument);
}

TEST_CASE("swiglu and geglu: formulas") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3, 10}, DType::F64, 1, 2.0);
  const Tensor swiglu = ops::swiglu(x), geglu = ops::geglu(x);
  CHECK(swiglu.shape() == Shape{2, 3, 5});
  for (int r = 0; r < 6; ++r) {
    for (int c = 0; c < 5; ++c) {
      const double gate = x.data<double>()[10 * r + c], up = x.data<double>()[10 * r + 5 + c];
      const double inner =
          std::sqrt(2.0 / std::numbers::pi) * (gate + 0.044715 * gate * gate * gate);
      CHECK(swiglu.data<double>()[5 * r + c] ==
            doctest::Approx(gate / (1.0 + std::exp(-gate)) * up).epsilon(1e-9));
      CHECK(geglu.data<double>()[5 * r + c] ==
            doctest::Approx(0.5 * gate * (1.0 + std::tanh(inner)) * up).epsilon(1e-9));
    }
  }
}

TEST_CASE("swiglu and geglu: gradients, and bf16 matches f32") {
  const auto context = Context::create();
  for (const auto gated : {ops::swiglu, ops::geglu}) {
    const auto f = [gated](const auto& t) { return gated(t[0]); };
    for (const Shape& shape : {Shape{2}, Shape{18}, Shape{3, 6}, Shape{2, 3, 14}}) {
      CAPTURE(shape.str());
      Tensor x = random_tensor(context, shape, DType::F64, 1, 2.0).set_requires_grad(true);
      CHECK(gradcheck(f, {x}) == "");
    }
    CHECK(compare_bf16(f, {random_tensor(context, {5, 66}, DType::BF16, 1)}, 0.01) == "");
  }
}

TEST_CASE("swiglu: refuses invalid arguments") {
  const auto context = Context::create();
  CHECK_THROWS_WITH_AS(ops::swiglu(random_tensor(context, {2, 3}, DType::F32, 1)),
                       "swiglu: the last dim of x holds gate and up side by side and must be even, "
                       "got shape [2, 3]",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::geglu(Tensor::empty(context, {2}, DType::F16)),
                       "geglu: x must be f64, f32 or bf16, got f16", InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
