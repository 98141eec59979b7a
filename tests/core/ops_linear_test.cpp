#include <doctest/doctest.h>

#include "core/ops/linear.h"
#include "tests/support/gradcheck.h"

namespace tessera {
namespace {

using ops::WeightLayout;
using testing::random_tensor;

TEST_CASE("linear: both layouts, with and without bias, by hand") {
  const auto context = Context::create();
  const Tensor x = Tensor::from<float>(context, {2, 2}, std::vector<float>{1, 2, 3, 4});
  const Tensor w = Tensor::from<float>(context, {3, 2}, std::vector<float>{1, 0, 0, 1, 10, 100});
  const Tensor t = Tensor::from<float>(context, {2, 3}, std::vector<float>{1, 0, 10, 0, 1, 100});
  const Tensor b = Tensor::from<float>(context, {3}, std::vector<float>{0.5F, 0, -1});
  const std::vector<float> plain{1, 2, 210, 3, 4, 430}, biased{1.5F, 2, 209, 3.5F, 4, 429};
  CHECK(ops::linear(x, w, {}).to_vector<float>() == plain);
  CHECK(ops::linear(x, t, {}, WeightLayout::InOut).to_vector<float>() == plain);
  CHECK(ops::linear(x, w, b).to_vector<float>() == biased);
  CHECK(ops::linear(x, t, b, WeightLayout::InOut).to_vector<float>() == biased);
}

TEST_CASE("linear: gradients, over odd shapes") {
  const auto context = Context::create();
  for (const auto& [lead, in, out] : std::vector<std::tuple<Shape, std::int64_t, std::int64_t>>{
           {{}, 3, 2}, {{1}, 1, 1}, {{5}, 3, 7}, {{2, 3}, 5, 4}, {{2, 1, 3}, 2, 9}}) {
    for (const WeightLayout layout : {WeightLayout::OutIn, WeightLayout::InOut}) {
      Shape shape = lead;
      shape.push_back(in);
      CAPTURE(shape.str());
      const Shape weight_shape = layout == WeightLayout::OutIn ? Shape{out, in} : Shape{in, out};
      Tensor x = random_tensor(context, shape, DType::F64, 1).set_requires_grad(true);
      Tensor w = random_tensor(context, weight_shape, DType::F64, 2).set_requires_grad(true);
      Tensor b = random_tensor(context, {out}, DType::F64, 3).set_requires_grad(true);
      const auto with_bias = [&](const std::vector<Tensor>& t) {
        return ops::linear(t[0], t[1], t[2], layout);
      };
      const auto without_bias = [&](const std::vector<Tensor>& t) {
        return ops::linear(t[0], t[1], {}, layout);
      };
      CHECK(testing::gradcheck(with_bias, {x, w, b}) == "");
      CHECK(testing::gradcheck(without_bias, {x, w}) == "");
      // Frozen weights, and an input that needs no gradient: each leaves the other's right.
      CHECK(testing::gradcheck(with_bias, {x, w.detach(), b.detach()}) == "");
      CHECK(testing::gradcheck(with_bias, {x.detach(), w, b}) == "");
      CHECK(testing::gradcheck(with_bias, {x.detach(), w.detach(), b}) == "");
    }
  }
}

TEST_CASE("linear: bf16 is near f32") {
  const auto context = Context::create();
  for (const WeightLayout layout : {WeightLayout::OutIn, WeightLayout::InOut}) {
    const auto f = [&](const std::vector<Tensor>& t) {
      return ops::linear(t[0], t[1], t[2], layout);
    };
    const Shape weight = layout == WeightLayout::OutIn ? Shape{17, 33} : Shape{33, 17};
    CHECK(testing::compare_bf16(f,
                                {random_tensor(context, {5, 33}, DType::BF16, 1),
                                 random_tensor(context, weight, DType::BF16, 2),
                                 random_tensor(context, {17}, DType::BF16, 3)},
                                0.01) == "");
  }
}

TEST_CASE("linear: a frozen weight's input is not kept") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {64, 8}, DType::F32, 1).set_requires_grad(true);
  const Tensor w = random_tensor(context, {8, 8}, DType::F32, 2);
  const Tensor y = ops::linear(ops::linear(x, w, {}), w, {});
  const auto two = static_cast<std::int64_t>(2 * x.bytes() + w.bytes());
  CHECK(context->ledger().total().current == two);
}

TEST_CASE("linear: what it refuses") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3}, DType::F32, 1);
  const Tensor w = random_tensor(context, {4, 3}, DType::F32, 2);
  CHECK_THROWS_WITH_AS(
      ops::linear(x, w, {}, WeightLayout::InOut),
      doctest::Contains("must be 4, as weight is [4, 3] ([in, out]); got x of shape [2, 3]"),
      InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::linear(x, w, x), doctest::Contains("bias must have shape [4]"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::linear(x, testing::convert(w, DType::BF16), {}),
                       doctest::Contains("weight must have dtype f32, got bf16"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::linear(x, random_tensor(context, {4}, DType::F32, 2), {}),
                       doctest::Contains("must be [out, in], got shape [4]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::linear(Tensor::empty(context, {2, 3}, DType::I32), w, {}),
                       doctest::Contains("got i32"), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::linear(x.alias({3, 2}, {1, 3}, 0), w, {}),
                       doctest::Contains("x must be contiguous"), InvalidArgument);
  const auto other = Context::create();
  CHECK_THROWS_WITH_AS(ops::linear(x, random_tensor(other, {4, 3}, DType::F32, 2), {}),
                       doctest::Contains("linear: tensors of different contexts"), InvalidArgument);
}

}  // namespace
}  // namespace tessera
