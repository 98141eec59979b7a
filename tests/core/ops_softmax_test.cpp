#include <doctest/doctest.h>

#include <cmath>

#include "core/ops/softmax.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

TEST_CASE("softmax: matches its definition, for large and infinite logits too") {
  const auto context = Context::create();
  for (const DType dtype : {DType::F64, DType::F32}) {
    const Tensor x = convert(
        Tensor::from<double>(context, {3, 3},
                             std::vector<double>{1, 2, 4, 1000, 999, -1000, -INFINITY, 0, 0}),
        dtype);
    const std::vector<double> in = values_of(x), y = values_of(ops::softmax(x)),
                              logs = values_of(ops::log_softmax(x));
    for (std::size_t r = 0; r < 9; r += 3) {
      const double highest = std::max({in[r], in[r + 1], in[r + 2]});
      double sum = 0;
      for (std::size_t c = r; c < r + 3; ++c) sum += std::exp(in[c] - highest);
      for (std::size_t c = r; c < r + 3; ++c) {
        CHECK(y[c] == doctest::Approx(std::exp(in[c] - highest) / sum).epsilon(1e-6));
        if (std::isfinite(in[c]))
          CHECK(logs[c] == doctest::Approx(in[c] - highest - std::log(sum)).epsilon(1e-6));
      }
    }
    CHECK(y[6] == 0.0);
    CHECK(logs[6] == -INFINITY);
  }
  const Tensor nothing = Tensor::full(context, {1, 3}, DType::F32, -INFINITY);
  CHECK(std::isnan(values_of(ops::softmax(nothing))[0]));
  CHECK(values_of(ops::softmax(Tensor::full(context, {2, 1}, DType::F32, 3.0))) ==
        std::vector<double>{1, 1});
  CHECK(ops::softmax(Tensor::empty(context, {0, 3}, DType::F32)).shape() == Shape{0, 3});
}

TEST_CASE("softmax: gradients for odd widths") {
  const auto context = Context::create();
  for (const Shape& shape : {Shape{1}, Shape{3, 1}, Shape{2, 33}, Shape{2, 3, 7}}) {
    Tensor x = random_tensor(context, shape, DType::F64, 1).set_requires_grad(true);
    CHECK(gradcheck([](const auto& t) { return ops::softmax(t[0]); }, {x}) == "");
    CHECK(gradcheck([](const auto& t) { return ops::log_softmax(t[0]); }, {x}) == "");
  }
}

TEST_CASE("softmax: refuses invalid arguments") {
  const auto context = Context::create();
  CHECK_THROWS_WITH_AS(ops::softmax(Tensor::full(context, {}, DType::F32, 1.0)),
                       "softmax: x must have at least one dim, got shape []", InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::log_softmax(Tensor::empty(context, {3}, DType::I32)),
                       "log_softmax: x must be f64, f32 or bf16, got i32", InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
