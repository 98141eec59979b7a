#include <doctest/doctest.h>

#include "core/autograd/autograd.h"
#include "core/ops/elementwise.h"
#include "core/ops/view.h"
#include "tests/support/gradcheck.h"
#include "tests/support/recorded.h"

namespace tessera::test {
namespace {

TEST_CASE("reshape shares storage and checks the element count") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 6}, DType::F32, 1);
  const Tensor y = ops::reshape(x, {3, 4});
  CHECK(y.storage() == x.storage());
  CHECK(y.shape() == Shape{3, 4});
  CHECK(values_of(y) == values_of(x));
  CHECK_THROWS_WITH_AS(ops::reshape(x, {5, 2}),
                       doctest::Contains("[2, 6] has 12 elements, shape [5, 2] has 10"),
                       InvalidArgument);
  CHECK_THROWS_AS(ops::reshape(x.alias({6, 2}, {1, 6}, 0), {12}), InvalidArgument);
}

TEST_CASE("views: gradients") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {5, 3}, DType::F64, 1).set_requires_grad(true);
  CHECK(gradcheck([](const auto& t) { return ops::reshape(t[0], {15}); }, {x}) == "");
  // Two views of one tensor are added: their gradients meet in one buffer.
  const auto joined = [](const std::vector<Tensor>& t) {
    const Tensor h = ops::reshape(t[0], {5, 3});
    return ops::add(ops::reshape(h, {15}), ops::reshape(h, {15}));
  };
  CHECK(gradcheck(joined, {x}) == "");
}

TEST_CASE("a gradient shared through a reshape is copied before it is accumulated into") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {4}, DType::F64, 1).set_requires_grad(true);
  Tensor y = random_tensor(context, {2, 2}, DType::F64, 2).set_requires_grad(true);
  const Tensor a = recorded(x), b = recorded(y);
  const Tensor side = ops::reshape(ops::dropout(a, 0.5F, 0), {2, 2});
  // The sum's gradient reaches a through a reshape and b directly: two tensors on one storage.
  const Tensor sum = ops::add(ops::reshape(a, {2, 2}), b);
  autograd::backward(ops::add(sum, side), Tensor::full(context, {2, 2}, DType::F64, 1.0));
  CHECK(values_of(y.grad()) == std::vector<double>{1, 1, 1, 1});
  const std::vector<double> mask =
      values_of(ops::dropout(Tensor::full(context, {4}, DType::F64, 1.0), 0.5F, 0));
  for (std::size_t i = 0; i < 4; ++i) CHECK(x.grad().data<double>()[i] == 1.0 + mask[i]);
}

}  // namespace
}  // namespace tessera::test
