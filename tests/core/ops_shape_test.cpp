#include <doctest/doctest.h>

#include "core/ops/elementwise.h"
#include "core/ops/shape.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

using Integers = std::vector<std::int32_t>;

Tensor counted(const std::shared_ptr<Context>& context, const Shape& shape) {
  Integers values(static_cast<std::size_t>(numel(shape)));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int32_t>(i);
  return Tensor::from<std::int32_t>(context, shape, values);
}

TEST_CASE("transpose: dense copies of any two dims") {
  const auto context = Context::create();
  const Tensor x = counted(context, {2, 3});
  const Tensor y = ops::transpose(x, 0, 1);
  CHECK(y.shape() == Shape{3, 2});
  CHECK(y.is_contiguous());
  CHECK(y.to_vector<std::int32_t>() == Integers{0, 3, 1, 4, 2, 5});
  CHECK(ops::transpose(x, -1, -1).to_vector<std::int32_t>() == x.to_vector<std::int32_t>());
  CHECK(ops::transpose(counted(context, {2, 1, 3, 2}), 1, 3).shape() == Shape{2, 2, 3, 1});
  Tensor z = random_tensor(context, {2, 3, 4, 5}, DType::F64, 1).set_requires_grad(true);
  for (const int dim : {0, 1, 2, 3})
    CHECK(gradcheck([&](const auto& t) { return ops::transpose(t[0], 1, dim); }, {z}) == "");
}

TEST_CASE("slice, split and concat: values and gradients") {
  const auto context = Context::create();
  const Tensor x = counted(context, {2, 4});
  CHECK(ops::slice(x, 1, 1, 3).to_vector<std::int32_t>() == Integers{1, 2, 5, 6});
  CHECK(ops::slice(x, -2, 1, 2).to_vector<std::int32_t>() == Integers{4, 5, 6, 7});
  CHECK(ops::slice(x, 0, 1, 1).shape() == Shape{0, 4});
  const std::vector<Tensor> parts = ops::split(x, {1, 0, 3}, 1);
  REQUIRE(parts.size() == 3);
  CHECK(parts[0].to_vector<std::int32_t>() == Integers{0, 4});
  CHECK(parts[1].shape() == Shape{2, 0});
  CHECK(parts[2].to_vector<std::int32_t>() == Integers{1, 2, 3, 5, 6, 7});
  CHECK(ops::concat(parts, 1).to_vector<std::int32_t>() == x.to_vector<std::int32_t>());
  CHECK(ops::concat({x, parts[0]}, -1).shape() == Shape{2, 5});
  CHECK(ops::concat({x, x}, 0).to_vector<std::int32_t>() ==
        Integers{0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7});

  Tensor z = random_tensor(context, {3, 5, 2}, DType::F64, 1).set_requires_grad(true);
  for (const int dim : {0, 1, 2}) {
    CHECK(gradcheck([&](const auto& t) { return ops::slice(t[0], dim, 1, 2); }, {z}) == "");
    CHECK(gradcheck(
              [&](const auto& t) {
                return ops::concat({t[0], t[0], 2 * t[0]}, dim);
              },
              {z}) == "");
  }
  const auto rejoined = [](const std::vector<Tensor>& t) {
    const std::vector<Tensor> p = ops::split(t[0], {1, 3, 1}, 1);
    return ops::concat({p[2], p[0] * p[2], p[1]}, 1);
  };
  CHECK(gradcheck(rejoined, {z}) == "");
  CHECK(compare_bf16(rejoined, {convert(z, DType::BF16)}, 0.02) == "");
}

TEST_CASE("broadcast_to and gather: values") {
  const auto context = Context::create();
  CHECK(ops::broadcast_to(counted(context, {2, 1}), {2, 2, 3}).to_vector<std::int32_t>() ==
        Integers{0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1});
  const Tensor x = Tensor::from<float>(context, {2, 3}, std::vector<float>{1, 2, 3, 10, 20, 30});
  const auto index = [&](const Shape& shape, const Integers& values) {
    return Tensor::from<std::int32_t>(context, shape, values);
  };
  CHECK(values_of(ops::gather(x, 1, index({2, 1}, {2, 0}))) == std::vector<double>{3, 10});
  CHECK(values_of(ops::gather(x, 0, index({1, 3}, {1, 0, 1}))) == std::vector<double>{10, 2, 30});
  CHECK(values_of(ops::gather(x, 0, index({3, 2}, {1, 0, 1, 1, 0, 0}))) ==
        std::vector<double>{10, 2, 10, 20, 1, 2});
  CHECK(ops::gather(x, 0, index({0, 3}, {})).shape() == Shape{0, 3});
}

TEST_CASE("shape operations: refuse invalid arguments") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3}, DType::F32, 1);
  CHECK_THROWS_WITH_AS(ops::transpose(x, 0, 2), "transpose: dim 2 is out of range for shape [2, 3]",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::transpose(Tensor::empty(context, {2, 3}, DType::U8), 0, 1),
                       "transpose: x must be f64, f32, bf16, i32 or i64, got u8", InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::slice(x, 1, 2, 4),
                       "slice: elements [2, 4) are not in dim 1 of x of shape [2, 3]",
                       InvalidArgument);
  CHECK_THROWS_AS(ops::slice(x, 1, 2, 1), InvalidArgument);
  CHECK_THROWS_AS(ops::slice(x, 1, -1, 1), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::split(x, {1, 1}, 1),
                       "split: sizes add up to 2, dim 1 of x of shape [2, 3] is 3",
                       InvalidArgument);
  CHECK_THROWS_AS(ops::split(x, {4, -1}, 1), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::concat({}, 0), "concat: needs tensors, got none", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::concat({x, random_tensor(context, {2, 4}, DType::F32, 1)}, 0),
      "concat: tensor 1 of shape [2, 4] does not fit tensor 0 of shape [2, 3]: only sizes of dim 0 "
      "may differ",
      InvalidArgument);
  CHECK_THROWS_AS(ops::concat({x, random_tensor(context, {3}, DType::F32, 1)}, 0), InvalidArgument);
  CHECK_THROWS_AS(ops::concat({x, convert(x, DType::BF16)}, 0), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::broadcast_to(x, {3}),
                       "broadcast_to: x of shape [2, 3] does not broadcast to [3]",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::gather(x, 1, Tensor::from<std::int32_t>(context, {2, 1}, Integers{0, 3})),
      "gather: index 3 at element 1 is not in [0, 3), the dim of x", InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::gather(x, 1, counted(context, {3, 1})),
                       "gather: index must have the dims of x, of at most its sizes except for dim "
                       "1, got x [2, 3] and index [3, 1]",
                       InvalidArgument);
  CHECK_THROWS_AS(ops::gather(x, 1, counted(context, {2})), InvalidArgument);
  CHECK_THROWS_AS(ops::gather(x, 1, x), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
