#include <doctest/doctest.h>

#include <cmath>

#include "core/ops/selection.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

using Integers = std::vector<std::int32_t>;

Tensor integers(const std::shared_ptr<Context>& context, const Shape& shape,
                const Integers& values) {
  return Tensor::from<std::int32_t>(context, shape, values);
}

TEST_CASE("where and masked_fill: values, broadcasting and integers") {
  const auto context = Context::create();
  const Tensor condition = integers(context, {2, 1}, {0, -3});
  const Tensor a = Tensor::from<float>(context, {3}, std::vector<float>{1, 2, 3});
  const Tensor b = Tensor::full(context, {}, DType::F32, 9.0);
  CHECK(values_of(ops::where(condition, a, b)) == std::vector<double>{9, 9, 9, 1, 2, 3});
  const Tensor tokens = integers(context, {3}, {5, 6, 7});
  CHECK(ops::where(condition, tokens, integers(context, {1}, {-1})).to_vector<std::int32_t>() ==
        Integers{-1, -1, -1, 5, 6, 7});
  CHECK(ops::masked_fill(tokens, ops::equal(tokens, 6), -1).to_vector<std::int32_t>() ==
        Integers{5, -1, 7});
  // A masked infinity does not reach the gradient.
  Tensor scores = random_tensor(context, {2, 3}, DType::F64, 1).set_requires_grad(true);
  const Tensor filled = ops::masked_fill(scores, integers(context, {1, 3}, {0, 0, 1}), -INFINITY);
  CHECK(values_of(filled)[2] == -INFINITY);
  CHECK(values_of(filled)[1] == values_of(scores)[1]);
}

TEST_CASE("where: gradients reach the chosen elements, also in inputs that were repeated") {
  const auto context = Context::create();
  const Tensor condition = integers(context, {2, 3}, {1, 0, 1, 0, 0, 1});
  const auto f = [&](const std::vector<Tensor>& t) { return ops::where(condition, t[0], t[1]); };
  for (const Shape& shape : {Shape{2, 3}, Shape{3}, Shape{2, 1}, Shape{}, Shape{4, 1, 3}}) {
    CAPTURE(shape.str());
    Tensor a = random_tensor(context, shape, DType::F64, 1).set_requires_grad(true);
    Tensor b = random_tensor(context, {2, 3}, DType::F64, 2).set_requires_grad(true);
    CHECK(gradcheck(f, {a, b}) == "");
    CHECK(gradcheck(f, {b, a}) == "");
    CHECK(gradcheck(f, {a, b.detach()}) == "");
    CHECK(gradcheck(f, {a.detach(), b}) == "");
    CHECK(gradcheck(f, {b, b}) == "");
  }
}

TEST_CASE("comparisons: values for floats, integers and NaN") {
  const auto context = Context::create();
  const Tensor a = Tensor::from<float>(context, {4}, std::vector<float>{1, 2, 3, NAN});
  const Tensor b = Tensor::full(context, {1}, DType::F32, 2.0);
  const auto check = [&](const Tensor& y, const Integers& expected) {
    CHECK(y.to_vector<std::int32_t>() == expected);
  };
  check(ops::equal(a, b), {0, 1, 0, 0});
  check(ops::not_equal(a, b), {1, 0, 1, 1});
  check(ops::less(a, b), {1, 0, 0, 0});
  check(ops::less_equal(a, b), {1, 1, 0, 0});
  check(ops::greater(a, b), {0, 0, 1, 0});
  check(ops::greater_equal(a, b), {0, 1, 1, 0});
  check(ops::equal(a, 2), {0, 1, 0, 0});
  check(ops::not_equal(a, 2), {1, 0, 1, 1});
  check(ops::less(a, 2), {1, 0, 0, 0});
  check(ops::less_equal(a, 2), {1, 1, 0, 0});
  check(ops::greater(a, 2), {0, 0, 1, 0});
  check(ops::greater_equal(a, 2), {0, 1, 1, 0});
  // Integers beyond the precision of f32.
  const Tensor ids = integers(context, {2}, {16777217, 16777216});
  check(ops::equal(ids, 16777217), {1, 0});
  check(ops::greater(ids, integers(context, {2}, {16777216, 16777217})), {1, 0});
  // A causal mask from two ranges.
  const Tensor t = integers(context, {3, 1}, {0, 1, 2}), s = integers(context, {3}, {0, 1, 2});
  check(ops::less(t, s), {0, 1, 1, 0, 0, 1, 0, 0, 0});
}

TEST_CASE("selections: refuse invalid arguments") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3}, DType::F32, 1);
  const Tensor mask = integers(context, {3}, {0, 1, 0});
  CHECK_THROWS_WITH_AS(ops::where(x, x, x), "where: condition must have dtype i32, got f32",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::where(mask, x, mask), "where: b must have dtype f32, got i32",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::where(integers(context, {2}, {0, 1}), x, x),
      "where: condition and (a, b) of shapes [2] and [2, 3] cannot be broadcast, as "
      "sizes 2 and 3 differ and neither is 1",
      InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::masked_fill(x, integers(context, {1, 1, 3}, {0, 1, 0}), 0.0),
      "masked_fill: mask of shape [1, 1, 3] does not broadcast to the shape of x, [2, 3]",
      InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::masked_fill(mask, mask, 0.5),
      "masked_fill: value must be an integer of 32 bits, as the tensor is i32, got 0.5",
      InvalidArgument);
  CHECK_THROWS_AS(ops::equal(mask, 3e9), InvalidArgument);
  CHECK_THROWS_AS(ops::less(x, mask), InvalidArgument);
  CHECK_THROWS_AS(ops::less(x, Tensor::empty(context, {4}, DType::F32)), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
