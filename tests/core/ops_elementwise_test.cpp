#include <doctest/doctest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/base/rng.h"
#include "core/ops/elementwise.h"
#include "core/ops/view.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

TEST_CASE("add: values and gradients") {
  const auto context = Context::create();
  const Tensor a = Tensor::from<float>(context, {3}, std::vector<float>{1, 2, 3});
  const Tensor b = Tensor::from<float>(context, {3}, std::vector<float>{10, 20, 30});
  CHECK(ops::add(a, b).to_vector<float>() == std::vector<float>{11, 22, 33});
  const auto f = [](const std::vector<Tensor>& t) { return ops::add(t[0], t[1]); };
  for (const Shape& shape : {Shape{1}, Shape{3, 5}, Shape{2, 1, 9}}) {
    Tensor x = random_tensor(context, shape, DType::F64, 1).set_requires_grad(true);
    Tensor y = random_tensor(context, shape, DType::F64, 2).set_requires_grad(true);
    CHECK(gradcheck(f, {x, y}) == "");
    CHECK(gradcheck(f, {x.detach(), y}) == "");
    CHECK(gradcheck(f, {x, x}) == "");
  }
  CHECK(compare_bf16(f,
                     {random_tensor(context, {33}, DType::BF16, 1),
                      random_tensor(context, {33}, DType::BF16, 2)},
                     0.005) == "");
}

TEST_CASE("add: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor a = random_tensor(context, {2, 3}, DType::F32, 1);
  CHECK_THROWS_WITH_AS(ops::add(a, random_tensor(context, {3, 2}, DType::F32, 1)),
                       doctest::Contains("b must have shape [2, 3], got [3, 2]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::add(a, convert(a, DType::BF16)),
                       doctest::Contains("b must have dtype f32, got bf16"), InvalidArgument);
  CHECK_THROWS_AS(ops::add(a, Tensor()), InternalError);
}

TEST_CASE("dropout: zeroes by the random stream, and scales the rest") {
  const auto context = Context::create();
  const float p = 0.25F;
  const std::int64_t n = 4001;
  const Tensor x = Tensor::full(context, {n}, DType::F32, 3.0);
  context->set_rng_step({.seed = 3, .step = 1, .first_sample = 100});
  const std::vector<float> y = ops::dropout(x, p, 2).to_vector<float>();
  const RngKey key = RngKey::make(3, RngPurpose::Dropout, 1, 2);
  std::int64_t zeroed = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const bool kept = uniform_from_bits(key.word(static_cast<std::uint64_t>(100 + i))) >= p;
    zeroed += kept ? 0 : 1;
    REQUIRE(y[static_cast<std::size_t>(i)] == doctest::Approx(kept ? 4.0 : 0.0));
  }
  CHECK(std::abs(static_cast<double>(zeroed) / static_cast<double>(n) - 0.25) < 0.03);
}

TEST_CASE("dropout: part of a batch gets the same mask as in the whole batch") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {6, 7}, DType::F32, 1);
  const std::vector<float> whole = ops::dropout(x, 0.5F, 2).to_vector<float>();
  const Tensor rows = x.alias({3, 7}, {7, 1}, 14);
  context->set_rng_step({.first_sample = 2});
  const std::vector<float> part = ops::dropout(rows, 0.5F, 2).to_vector<float>();
  CHECK(part == std::vector<float>(whole.begin() + 14, whole.begin() + 35));
}

TEST_CASE("dropout: gradients, bf16, and p = 0") {
  const auto context = Context::create();
  const auto f = [](const std::vector<Tensor>& t) { return ops::dropout(t[0], 0.4F, 2); };
  Tensor x = random_tensor(context, {5, 7}, DType::F64, 1).set_requires_grad(true);
  CHECK(gradcheck(f, {x}) == "");
  CHECK(compare_bf16(f, {random_tensor(context, {99}, DType::BF16, 1)}, 0.01) == "");
  CHECK(ops::dropout(x, 0.0F, 0).impl() == x.impl());
}

TEST_CASE("dropout: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2}, DType::F32, 1);
  CHECK_THROWS_WITH_AS(ops::dropout(x, 1.0F, 0), doctest::Contains("[0, 1), got 1"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::dropout(x, -0.5F, 0), doctest::Contains("got -0.5"), InvalidArgument);
  CHECK_THROWS_AS(ops::dropout(x, std::nanf(""), 0), InvalidArgument);
  CHECK_THROWS_AS(ops::dropout(Tensor::empty(context, {2}, DType::I32), 0.5F, 0), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
