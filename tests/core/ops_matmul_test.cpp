#include <doctest/doctest.h>

#include "core/autograd/autograd.h"
#include "core/ops/matmul.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

struct Case {
  Shape a, b, y;
};

const Case kCases[] = {
    {{3, 5}, {5, 4}, {3, 4}},
    {{1, 1}, {1, 1}, {1, 1}},
    {{2, 3, 5}, {2, 5, 7}, {2, 3, 7}},
    {{2, 3, 5}, {5, 7}, {2, 3, 7}},
    {{2, 3, 5}, {1, 5, 7}, {2, 3, 7}},
    {{3, 5}, {1, 5, 7}, {1, 3, 7}},
    {{3, 5}, {2, 5, 7}, {2, 3, 7}},
    {{1, 3, 5}, {2, 5, 7}, {2, 3, 7}},
    {{2, 1, 3, 2}, {4, 2, 3}, {2, 4, 3, 3}},
    {{2, 4, 1, 3}, {2, 4, 3, 1}, {2, 4, 1, 1}},
    {{0, 5}, {5, 4}, {0, 4}},
    {{2, 0, 5}, {2, 5, 4}, {2, 0, 4}},
    {{2, 3, 0}, {2, 0, 4}, {2, 3, 4}},
    {{0, 3, 5}, {0, 5, 4}, {0, 3, 4}},
};

TEST_CASE("matmul: values and gradients of batches that are equal or broadcast") {
  const auto f = [](const std::vector<Tensor>& t) { return ops::matmul(t[0], t[1]); };
  for (const Case& c : kCases) {
    CAPTURE(c.a.str());
    CAPTURE(c.b.str());
    const auto context = Context::create();
    Tensor a = random_tensor(context, c.a, DType::F64, 1).set_requires_grad(true);
    Tensor b = random_tensor(context, c.b, DType::F64, 2).set_requires_grad(true);
    const Tensor y = ops::matmul(a, b);
    REQUIRE(y.shape() == c.y);
    const std::vector<double> left = values_of(a), right = values_of(b), out = values_of(y);
    const std::int64_t rows = c.y.at(-2), columns = c.y.at(-1), inner = c.a.at(-1);
    const std::int64_t matrices = rows * columns == 0 ? 0 : numel(c.y) / (rows * columns);
    // Place of matrix i of the result in a factor.
    const auto place = [&](const Shape& shape, std::int64_t i) {
      std::int64_t at = 0, step = 1;
      for (int d = c.y.size() - 3, e = shape.size() - 3; e >= 0; --d, --e) {
        at += shape[e] == 1 ? 0 : i % c.y[d] * step;
        step *= shape[e];
        i /= c.y[d];
      }
      return at;
    };
    for (std::int64_t n = 0; n < matrices; ++n)
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t k = 0; k < columns; ++k) {
          double sum = 0;
          for (std::int64_t i = 0; i < inner; ++i)
            sum += left[static_cast<std::size_t>((place(c.a, n) * rows + r) * inner + i)] *
                   right[static_cast<std::size_t>((place(c.b, n) * inner + i) * columns + k)];
          CHECK(out[static_cast<std::size_t>((n * rows + r) * columns + k)] ==
                doctest::Approx(sum).epsilon(1e-12));
        }
    if (y.numel() == 0) {
      autograd::backward(y, Tensor::empty(context, c.y, DType::F64));
      CHECK(values_of(b.grad()) == std::vector<double>(static_cast<std::size_t>(b.numel()), 0.0));
      continue;
    }
    CHECK(gradcheck(f, {a, b}) == "");
    if (inner == 0) continue;
    CHECK(gradcheck(f, {a, b.detach()}) == "");
    CHECK(gradcheck(f, {a.detach(), b}) == "");
    CHECK(compare_bf16(f, {convert(a, DType::BF16), convert(b, DType::BF16)}, 0.02) == "");
  }
  const auto context = Context::create();
  Tensor x = random_tensor(context, {2, 3, 3}, DType::F64, 1).set_requires_grad(true);
  CHECK(gradcheck([](const auto& t) { return ops::matmul(t[0], t[0]); }, {x}) == "");
}

TEST_CASE("matmul: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor x = random_tensor(context, {2, 3, 4}, DType::F32, 1);
  const auto of = [&](const Shape& shape) { return Tensor::empty(context, shape, DType::F32); };
  CHECK_THROWS_WITH_AS(
      ops::matmul(x, of({3, 4})),
      "matmul: a and b must be [..., M, K] and [..., K, N], got shapes [2, 3, 4] and [3, 4]",
      InvalidArgument);
  CHECK_THROWS_AS(ops::matmul(x, of({4})), InvalidArgument);
  CHECK_THROWS_AS(ops::matmul(of({4}), of({4, 2})), InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::matmul(x, of({3, 4, 5})),
                       "matmul: leading dims of shapes [2] and [3] cannot be broadcast, as sizes 2 "
                       "and 3 differ and neither is 1",
                       InvalidArgument);
  CHECK_THROWS_AS(ops::matmul(x, Tensor::empty(context, {4, 2}, DType::BF16)), InvalidArgument);
  CHECK_THROWS_AS(ops::matmul(x, of({4, 4}).alias({4, 4}, {1, 4}, 0)), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
