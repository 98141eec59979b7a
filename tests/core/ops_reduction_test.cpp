#include <doctest/doctest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/ops/reduction.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

Tensor numbers(const std::shared_ptr<Context>& context, const Shape& shape,
               const std::vector<double>& values) {
  return Tensor::from<double>(context, shape, values);
}

TEST_CASE("sum and mean: values over all, one and negative dims") {
  const auto context = Context::create();
  const Tensor x = numbers(context, {2, 3}, {1, 2, 3, 10, 20, 30});
  CHECK(ops::sum(x).item() == 66);
  CHECK(ops::sum(x).shape() == Shape{});
  CHECK(ops::mean(x).item() == 11);
  CHECK(values_of(ops::sum(x, 0)) == std::vector<double>{11, 22, 33});
  CHECK(values_of(ops::sum(x, -1)) == std::vector<double>{6, 60});
  CHECK(values_of(ops::mean(x, 0)) == std::vector<double>{5.5, 11, 16.5});
  CHECK(ops::sum(x, 0, true).shape() == Shape{1, 3});
  CHECK(ops::mean(x, -1, true).shape() == Shape{2, 1});
  const Tensor columns = x.alias({3, 2}, {1, 3}, 0);
  CHECK(ops::sum(columns).item() == 66);
  CHECK(values_of(ops::sum(columns, 0)) == std::vector<double>{6, 60});
  CHECK(ops::sum(convert(x, DType::BF16)).dtype() == DType::BF16);
  CHECK(ops::sum(convert(x, DType::BF16)).item() == 66);
  const Tensor none = Tensor::empty(context, {0, 3}, DType::F32);
  CHECK(ops::sum(none).item() == 0);
  CHECK(std::isnan(ops::mean(none).item()));
  CHECK(values_of(ops::sum(none, 0)) == std::vector<double>{0, 0, 0});
  CHECK(ops::sum(none, 1).shape() == Shape{0});
  const Tensor scalar = Tensor::full(context, {}, DType::F64, 4.0);
  CHECK(ops::sum(scalar).item() == 4);
}

TEST_CASE("sum: a long f32 sum keeps its precision") {
  const auto context = Context::create({.threads = 2});
  const Tensor ones = Tensor::full(context, {2, 1 << 20}, DType::F32, 0.1);
  const double expected = static_cast<double>(0.1F) * (1 << 20);
  for (const double sum : values_of(ops::sum(ones, 1)))
    CHECK(sum == doctest::Approx(expected).epsilon(4e-6));
  CHECK(ops::sum(ones).item() == doctest::Approx(2 * expected).epsilon(1e-6));
}

TEST_CASE("max and argmax: values, places, ties and NaN") {
  const auto context = Context::create();
  const Tensor x = numbers(context, {2, 3}, {3, 7, 7, 9, 1, 2});
  CHECK(ops::max(x).item() == 9);
  CHECK(ops::argmax(x).to_vector<std::int32_t>() == std::vector<std::int32_t>{3});
  CHECK(values_of(ops::max(x, 0)) == std::vector<double>{9, 7, 7});
  CHECK(values_of(ops::max(x, 1)) == std::vector<double>{7, 9});
  CHECK(ops::argmax(x, 1).to_vector<std::int32_t>() == std::vector<std::int32_t>{1, 0});
  CHECK(ops::argmax(x, 0, true).shape() == Shape{1, 3});
  CHECK(ops::argmax(x).shape() == Shape{});
  CHECK_FALSE(ops::argmax(numbers(context, {2}, {1, 2}).set_requires_grad(true)).requires_grad());
  const Tensor with_nan = numbers(context, {3}, {5, NAN, 9});
  CHECK(std::isnan(ops::max(with_nan).item()));
  CHECK(ops::argmax(with_nan).to_vector<std::int32_t>()[0] == 1);
  CHECK(ops::max(numbers(context, {2}, {-INFINITY, -INFINITY})).item() == -INFINITY);

  Tensor tied = numbers(context, {4}, {1, 5, 5, 2}).set_requires_grad(true);
  autograd::backward(ops::max(tied));
  CHECK(values_of(tied.grad()) == std::vector<double>{0, 1, 0, 0});
}

TEST_CASE("reductions: refuse invalid arguments") {
  const auto context = Context::create();
  const Tensor x = numbers(context, {2, 3}, {1, 2, 3, 4, 5, 6});
  CHECK_THROWS_WITH_AS(ops::sum(x, 2), "sum: dim 2 is out of range for shape [2, 3]",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::mean(x, -3), "mean: dim -3 is out of range for shape [2, 3]",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::max(Tensor::empty(context, {2, 0}, DType::F32), 1),
                       "max: x of shape [2, 0] has no elements to choose from", InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::argmax(Tensor::empty(context, {2}, DType::I32)),
                       "argmax: x must be f64, f32 or bf16, got i32", InvalidArgument);
  CHECK_THROWS_AS(ops::sum(Tensor::full(context, {}, DType::F32, 1.0), 0), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
