#include <doctest/doctest.h>

#include <cmath>

#include "core/ops/norm.h"
#include "tests/support/gradcheck.h"

namespace tessera {
namespace {

using testing::random_tensor;

TEST_CASE("layer_norm: its formula, also far from zero") {
  const auto context = Context::create();
  for (const double offset : {0.0, 1e4}) {
    Tensor x = random_tensor(context, {3, 7}, DType::F64, 1);
    for (int i = 0; i < 21; ++i) x.data<double>()[i] += offset;
    const Tensor w = random_tensor(context, {7}, DType::F64, 2);
    const Tensor b = random_tensor(context, {7}, DType::F64, 3);
    const double eps = 1e-5;
    const Tensor y = ops::layer_norm(x, w, b, eps);
    for (int r = 0; r < 3; ++r) {
      const double* row = x.data<double>() + 7 * r;
      double mean = 0.0, variance = 0.0;
      for (int c = 0; c < 7; ++c) mean += row[c] / 7;
      for (int c = 0; c < 7; ++c) variance += (row[c] - mean) * (row[c] - mean) / 7;
      for (int c = 0; c < 7; ++c) {
        const double expected =
            w.data<double>()[c] * (row[c] - mean) / std::sqrt(variance + eps) + b.data<double>()[c];
        CHECK(y.data<double>()[7 * r + c] == doctest::Approx(expected).epsilon(1e-9));
      }
    }
  }
}

TEST_CASE("layer_norm: gradients, over odd shapes") {
  const auto context = Context::create();
  for (const Shape& shape : {Shape{5}, Shape{1, 2}, Shape{4, 7}, Shape{2, 3, 5}}) {
    CAPTURE(shape.str());
    const Shape channels{shape.back()};
    Tensor x = random_tensor(context, shape, DType::F64, 1).set_requires_grad(true);
    Tensor w = random_tensor(context, channels, DType::F64, 2).set_requires_grad(true);
    Tensor b = random_tensor(context, channels, DType::F64, 3).set_requires_grad(true);
    const auto f = [](const std::vector<Tensor>& t) {
      return ops::layer_norm(t[0], t[1], t[2], 1e-2);
    };
    CHECK(testing::gradcheck(f, {x, w, b}) == "");
    CHECK(testing::gradcheck(f, {x, w.detach(), b.detach()}) == "");
    CHECK(testing::gradcheck(f, {x.detach(), w, b.detach()}) == "");
    CHECK(testing::gradcheck(f, {x.detach(), w.detach(), b}) == "");
    // One tensor as weight and bias: both gradients have one place.
    const auto one = [](const std::vector<Tensor>& t) {
      return ops::layer_norm(t[0], t[1], t[1], 1e-2);
    };
    CHECK(testing::gradcheck(one, {x, w}) == "");
  }
}

TEST_CASE("layer_norm: bf16 is near f32") {
  const auto context = Context::create();
  const auto f = [](const std::vector<Tensor>& t) {
    return ops::layer_norm(t[0], t[1], t[2], 1e-5);
  };
  CHECK(testing::compare_bf16(f,
                              {random_tensor(context, {9, 33}, DType::BF16, 1),
                               random_tensor(context, {33}, DType::BF16, 2),
                               random_tensor(context, {33}, DType::BF16, 3)},
                              0.01) == "");
}

TEST_CASE("layer_norm: statistics are kept only when a backward may follow") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {6, 4}, DType::F32, 1).set_requires_grad(true);
  const Tensor w = random_tensor(context, {4}, DType::F32, 2);
  const std::int64_t before = context->ledger().total().current;
  const auto result = static_cast<std::int64_t>(x.bytes());
  const Tensor y = ops::layer_norm(x, w, w, 1e-5);
  CHECK(context->ledger().total().current - before == result + 2 * 6 * 4);
  const NoGradGuard off(*context);
  const Tensor z = ops::layer_norm(x, w, w, 1e-5);
  CHECK(context->ledger().total().current - before == 2 * result + 2 * 6 * 4);
}

TEST_CASE("layer_norm: what it refuses") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3}, DType::F32, 1);
  const Tensor w = random_tensor(context, {3}, DType::F32, 2);
  const Tensor wide = random_tensor(context, {4}, DType::F32, 2);
  CHECK_THROWS_WITH_AS(ops::layer_norm(x, wide, w, 1e-5),
                       doctest::Contains("weight must have shape [3], got [4]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::layer_norm(x, w, wide, 1e-5),
                       doctest::Contains("bias must have shape [3], got [4]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::layer_norm(x, w, testing::convert(w, DType::F64), 1e-5),
                       doctest::Contains("bias must have dtype f32, got f64"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::layer_norm(x, w, w, 0.0), doctest::Contains("above 0, got 0"),
                       InvalidArgument);
  CHECK_THROWS_AS(ops::layer_norm(x, w, w, std::nan("")), InvalidArgument);
  const Tensor none = Tensor::empty(context, {0}, DType::F32);
  CHECK_THROWS_WITH_AS(
      ops::layer_norm(Tensor::empty(context, {2, 0}, DType::F32), none, none, 1e-5),
      doctest::Contains("[2, 0]"), InvalidArgument);
}

}  // namespace
}  // namespace tessera
