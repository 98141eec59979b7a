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
  CHECK_THROWS_WITH_AS(
      ops::add(a, random_tensor(context, {3, 2}, DType::F32, 1)),
      "add: a and b of shapes [2, 3] and [3, 2] cannot be broadcast, as sizes 2 and "
      "3 differ and neither is 1",
      InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::add(a, convert(a, DType::BF16)),
                       doctest::Contains("b must have dtype f32, got bf16"), InvalidArgument);
  CHECK_THROWS_AS(ops::add(a, Tensor()), InvalidArgument);
}

struct Arithmetic {
  const char* name;
  Tensor (*operation)(const Tensor&, const Tensor&);
  double (*reference)(double, double);
};

const Arithmetic kArithmetic[] = {
    {"add", [](const Tensor& a, const Tensor& b) { return a + b; },
     [](double a, double b) { return a + b; }},
    {"sub", [](const Tensor& a, const Tensor& b) { return a - b; },
     [](double a, double b) { return a - b; }},
    {"mul", [](const Tensor& a, const Tensor& b) { return a * b; },
     [](double a, double b) { return a * b; }},
    {"div", [](const Tensor& a, const Tensor& b) { return a / b; },
     [](double a, double b) { return a / b; }},
};

struct Broadcast {
  Shape a, b, y;
};

const Broadcast kBroadcasts[] = {
    {{3, 5}, {3, 5}, {3, 5}},
    {{3, 5}, {5}, {3, 5}},
    {{5}, {3, 5}, {3, 5}},
    {{3, 1}, {1, 5}, {3, 5}},
    {{}, {2, 3}, {2, 3}},
    {{2, 3}, {1}, {2, 3}},
    {{1}, {}, {1}},
    {{2, 1, 3}, {4, 1}, {2, 4, 3}},
    {{2, 3, 1, 2}, {3, 4, 1}, {2, 3, 4, 2}},
    {{0, 3}, {3}, {0, 3}},
    {{1, 3}, {0, 1}, {0, 3}},
};

// Element of x at the place of element i of the shape that it is broadcast to.
std::size_t source(const Shape& x, const Shape& shape, std::int64_t i) {
  std::int64_t at = 0, step = 1;
  for (int d = shape.size() - 1, e = x.size() - 1; e >= 0; --d, --e) {
    at += x[e] == 1 ? 0 : i % shape[d] * step;
    step *= x[e];
    i /= shape[d];
  }
  return static_cast<std::size_t>(at);
}

TEST_CASE("arithmetic: broadcasts values and gradients") {
  for (const Arithmetic& f : kArithmetic) {
    CAPTURE(f.name);
    const auto operation = [&](const std::vector<Tensor>& t) { return f.operation(t[0], t[1]); };
    for (const Broadcast& c : kBroadcasts) {
      CAPTURE(c.a.str());
      CAPTURE(c.b.str());
      const auto context = Context::create();
      Tensor a = random_tensor(context, c.a, DType::F64, 1).set_requires_grad(true);
      Tensor b = random_tensor(context, c.b, DType::F64, 2).set_requires_grad(true);
      for (std::int64_t i = 0; i < b.numel(); ++i)
        b.data<double>()[i] += b.data<double>()[i] < 0 ? -1.0 : 1.0;
      const Tensor y = f.operation(a, b);
      CHECK(y.shape() == c.y);
      const std::vector<double> left = values_of(a), right = values_of(b), out = values_of(y);
      for (std::int64_t i = 0; i < y.numel(); ++i)
        CHECK(out[static_cast<std::size_t>(i)] ==
              f.reference(left[source(c.a, c.y, i)], right[source(c.b, c.y, i)]));
      if (y.numel() == 0) continue;
      CHECK(gradcheck(operation, {a, b}) == "");
      CHECK(gradcheck(operation, {a.detach(), b}) == "");
      CHECK(gradcheck(operation, {a, b.detach()}) == "");
      CHECK(gradcheck(operation, {b, b}) == "");
      const Tensor half_b = convert(b, DType::BF16);
      CHECK(compare_bf16(operation, {convert(a, DType::BF16), half_b}, 0.02) == "");
    }
  }
}

TEST_CASE("arithmetic: an empty tensor's gradient is zero in the tensor that was repeated") {
  const auto context = Context::create();
  Tensor a = Tensor::full(context, {3}, DType::F64, 1.0).set_requires_grad(true);
  const Tensor y = a * Tensor::empty(context, {0, 3}, DType::F64);
  autograd::backward(y, Tensor::empty(context, {0, 3}, DType::F64));
  CHECK(values_of(a.grad()) == std::vector<double>{0, 0, 0});
}

TEST_CASE("arithmetic with numbers: values and gradients") {
  const auto context = Context::create();
  Tensor x = Tensor::from<double>(context, {3}, std::vector<double>{1, 2, -4});
  x.set_requires_grad(true);
  const auto check = [&](auto f, const std::vector<double>& expected) {
    CHECK(values_of(f(x)) == expected);
    CHECK(gradcheck([&](const std::vector<Tensor>& t) { return f(t[0]); }, {x}) == "");
    CHECK(compare_bf16([&](const std::vector<Tensor>& t) { return f(t[0]); },
                       {convert(x, DType::BF16)}, 0.02) == "");
  };
  check([](const Tensor& t) { return t + 2; }, {3, 4, -2});
  check([](const Tensor& t) { return 2 + t; }, {3, 4, -2});
  check([](const Tensor& t) { return t - 2; }, {-1, 0, -6});
  check([](const Tensor& t) { return 2 - t; }, {1, 0, 6});
  check([](const Tensor& t) { return t * 0.5; }, {0.5, 1, -2});
  check([](const Tensor& t) { return 0.5 * t; }, {0.5, 1, -2});
  check([](const Tensor& t) { return t / 3; }, {1.0 / 3, 2.0 / 3, -4.0 / 3});
  check([](const Tensor& t) { return 2 / t; }, {2, 1, -0.5});
  check([](const Tensor& t) { return -t; }, {-1, -2, 4});
  check([](const Tensor& t) { return 3 * t * t - t / (t + 10) + 1; },
        {4 - 1.0 / 11, 13 - 2.0 / 12, 49 + 4.0 / 6});
}

TEST_CASE("arithmetic: refuses invalid arguments") {
  const auto context = Context::create();
  const Tensor a = random_tensor(context, {2, 3}, DType::F32, 1);
  CHECK_THROWS_WITH_AS(
      a * Tensor::empty(context, {4}, DType::F32),
      "mul: a and b of shapes [2, 3] and [4] cannot be broadcast, as sizes 3 and 4 "
      "differ and neither is 1",
      InvalidArgument);
  CHECK_THROWS_WITH_AS(a - Tensor::empty(context, {3}, DType::F64),
                       "sub: b must have dtype f32, got f64; convert it with ops::cast",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(Tensor::empty(context, {3}, DType::I32) / 2.0,
                       "div: x must be f64, f32 or bf16, got i32", InvalidArgument);
  CHECK_THROWS_AS(a + random_tensor(Context::create(), {2, 3}, DType::F32, 1), InvalidArgument);
  CHECK_THROWS_AS(a + Tensor(), InvalidArgument);
}

TEST_CASE("cast: converts values and gradients") {
  const auto context = Context::create();
  Tensor x = random_tensor(context, {3, 5}, DType::F64, 1).set_requires_grad(true);
  const Tensor half = ops::cast(x, DType::BF16);
  CHECK(values_of(half) == values_of(convert(x, DType::BF16)));
  CHECK(ops::cast(half, DType::BF16).impl() == half.impl());
  autograd::backward(half, Tensor::full(context, {3, 5}, DType::BF16, 0.1));
  CHECK(values_of(x.grad()) == values_of(Tensor::full(context, {3, 5}, DType::BF16, 0.1)));
  CHECK(compare_bf16([](const auto& t) { return ops::cast(t[0], DType::F32); },
                     {convert(x, DType::BF16)}, 0.0) == "");
  CHECK_THROWS_WITH_AS(ops::cast(x, DType::I32), "cast: dtype must be f64, f32 or bf16, got i32",
                       InvalidArgument);
}

TEST_CASE("arithmetic: nothing is computed on the meta device") {
  const auto context = Context::create({.device = {DeviceType::Meta, 0}});
  for (const Arithmetic& f : kArithmetic) {
    Tensor a = Tensor::empty(context, {2, 1, 3}, DType::BF16).set_requires_grad(true);
    Tensor b = Tensor::empty(context, {4, 1}, DType::BF16).set_requires_grad(true);
    const Tensor y = f.operation(a, b);
    autograd::backward(y, Tensor::empty(context, {2, 4, 3}, DType::BF16));
    CHECK(a.grad().shape() == a.shape());
    CHECK(b.grad().shape() == b.shape());
  }
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
