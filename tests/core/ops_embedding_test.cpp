#include <doctest/doctest.h>

#include "core/autograd/autograd.h"
#include "core/ops/embedding.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

Tensor tokens_of(const std::shared_ptr<Context>& context, const Shape& shape,
                 const std::vector<std::int32_t>& values) {
  return Tensor::from<std::int32_t>(context, shape, values);
}

TEST_CASE("embedding: sums of rows") {
  const auto context = Context::create();
  const Tensor tokens = tokens_of(context, {2, 2}, {2, 0, 1, 2});
  const Tensor w = Tensor::from<float>(context, {3, 2}, std::vector<float>{1, 2, 3, 4, 5, 6});
  const Tensor p = Tensor::from<float>(context, {3, 2}, std::vector<float>{0, 0, 10, 20, 30, 40});
  CHECK(ops::embedding(tokens, w, {}).to_vector<float>() ==
        std::vector<float>{5, 6, 1, 2, 3, 4, 5, 6});
  const Tensor y = ops::embedding(tokens, w, p, 1);
  CHECK(y.shape() == Shape{2, 2, 2});
  CHECK(y.to_vector<float>() == std::vector<float>{15, 26, 31, 42, 13, 24, 35, 46});
}

TEST_CASE("embedding: gradients, with repeated and missing tokens") {
  const auto context = Context::create();
  const Tensor tokens = tokens_of(context, {2, 3}, {4, 0, 4, 4, 2, 0});
  Tensor w = random_tensor(context, {5, 3}, DType::F64, 1).set_requires_grad(true);
  Tensor p = random_tensor(context, {5, 3}, DType::F64, 2).set_requires_grad(true);
  const auto both = [&](const std::vector<Tensor>& t) {
    return ops::embedding(tokens, t[0], t[1], 2);
  };
  CHECK(gradcheck(both, {w, p}) == "");
  CHECK(gradcheck(both, {w, p.detach()}) == "");
  CHECK(gradcheck(both, {w.detach(), p}) == "");
  CHECK(gradcheck([&](const auto& t) { return ops::embedding(tokens, t[0], {}); }, {w}) == "");
  CHECK(gradcheck([&](const auto& t) { return ops::embedding(tokens, t[0], t[0]); }, {w}) == "");
}

TEST_CASE("embedding: bf16 matches f32, with an f32 gradient") {
  const auto context = Context::create();
  const Tensor tokens = tokens_of(context, {2, 3}, {4, 0, 4, 4, 2, 0});
  Tensor w = random_tensor(context, {5, 9}, DType::BF16, 1);
  CHECK(compare_bf16([&](const auto& t) { return ops::embedding(tokens, t[0], t[1], 0); },
                     {w, random_tensor(context, {3, 9}, DType::BF16, 2)}, 0.01) == "");
  w.set_requires_grad(true);
  autograd::backward(ops::embedding(tokens, w, {}),
                     random_tensor(context, {2, 3, 9}, DType::BF16, 3));
  CHECK(w.grad().dtype() == DType::F32);
}

TEST_CASE("embedding: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor w = random_tensor(context, {5, 3}, DType::F32, 1);
  const Tensor p = random_tensor(context, {4, 3}, DType::F32, 2);
  const Tensor tokens = tokens_of(context, {1, 3}, {0, 1, 2});
  for (const std::int32_t bad : {-1, 5}) {
    CHECK_THROWS_WITH_AS(ops::embedding(tokens_of(context, {2, 2}, {0, 1, 2, bad}), w, p),
                         doctest::Contains(fmt::format("token {} at row 1, column 1", bad).c_str()),
                         InvalidArgument);
  }
  CHECK_THROWS_WITH_AS(ops::embedding(tokens, w, p, 2),
                       doctest::Contains("positions 2 to 4 requested, position_weight has 4"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::embedding(tokens, w, p, -1), doctest::Contains("got -1"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::embedding(tokens, w, random_tensor(context, {4, 2}, DType::F32, 2)),
                       doctest::Contains("position_weight must have shape [4, 3], got [4, 2]"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::embedding(w, w, p), doctest::Contains("dtype i32, got f32"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::embedding(tokens_of(context, {3}, {0, 1, 2}), w, p),
                       doctest::Contains("[B, T], got shape [3]"), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
