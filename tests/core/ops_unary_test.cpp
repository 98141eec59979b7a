#include <doctest/doctest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/ops/elementwise.h"
#include "core/ops/unary.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

struct Function {
  const char* name;
  Tensor (*operation)(const Tensor&);
  double (*reference)(double);
  bool positive = false;  // defined for positive numbers only
};

const Function kFunctions[] = {
    {"relu", ops::relu, [](double x) { return x > 0 ? x : 0.0; }},
    {"sigmoid", ops::sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }},
    {"silu", ops::silu, [](double x) { return x / (1 + std::exp(-x)); }},
    {"tanh", ops::tanh, [](double x) { return std::tanh(x); }},
    {"exp", ops::exp, [](double x) { return std::exp(x); }},
    {"log", ops::log, [](double x) { return std::log(x); }, true},
    {"sqrt", ops::sqrt, [](double x) { return std::sqrt(x); }, true},
    {"neg", ops::neg, [](double x) { return -x; }},
};

Tensor input_of(const Function& f, const std::shared_ptr<Context>& context, const Shape& shape,
                DType dtype) {
  Tensor x = random_tensor(context, shape, DType::F64, 3);
  double* const values = x.data<double>();
  for (std::int64_t i = 0; i < x.numel(); ++i)
    if (f.positive) values[i] = 0.1 + std::abs(values[i]);
  return dtype == DType::F64 ? x : convert(x, dtype);
}

TEST_CASE("functions of one tensor: values and gradients") {
  for (const Function& f : kFunctions) {
    CAPTURE(f.name);
    const auto context = Context::create();
    const auto operation = [&](const std::vector<Tensor>& t) { return f.operation(t[0]); };
    for (const Shape& shape : {Shape{}, Shape{1}, Shape{3, 5}, Shape{2, 1, 9}, Shape{0, 2}}) {
      CAPTURE(shape.str());
      Tensor x = input_of(f, context, shape, DType::F64).set_requires_grad(true);
      const Tensor y = f.operation(x);
      CHECK(y.shape() == shape);
      const std::vector<double> in = values_of(x), out = values_of(y);
      for (std::size_t i = 0; i < in.size(); ++i)
        CHECK(out[i] == doctest::Approx(f.reference(in[i])).epsilon(1e-14));
      if (shape.size() > 0 && x.numel() > 0) CHECK(gradcheck(operation, {x}) == "");
    }
    CHECK(compare_bf16(operation, {input_of(f, context, {33}, DType::BF16)}, 0.02) == "");
    // Gradient of a strided view:
    const Tensor x = input_of(f, context, {4, 3}, DType::F32), column = x.alias({4}, {3}, 1);
    const std::vector<double> all = values_of(f.operation(x));
    CHECK(values_of(f.operation(column)) == std::vector<double>{all[1], all[4], all[7], all[10]});
  }
}

TEST_CASE("functions of one tensor: limits") {
  const auto context = Context::create();
  const float inf = INFINITY;
  const std::vector<float> in{-inf, -200, -100, -88, 0, 88, 200, inf};
  const Tensor x = Tensor::from<float>(context, {8}, in);
  const auto values = [&](const Tensor& y) { return y.to_vector<float>(); };
  const std::vector<float> powers = values(ops::exp(x));
  CHECK(powers[0] == 0.0F);
  CHECK(powers[1] == 0.0F);
  CHECK(powers[3] == doctest::Approx(std::exp(-88.0F)).epsilon(1e-5));
  CHECK(powers[4] == 1.0F);
  CHECK(powers[5] == doctest::Approx(std::exp(88.0F)).epsilon(1e-6));
  CHECK(powers[6] == inf);
  CHECK(powers[7] == inf);
  const std::vector<float> s = values(ops::sigmoid(x));
  CHECK(s[0] < 1e-37F);
  CHECK(s[7] == 1.0F);
  const std::vector<float> gated = values(ops::silu(x));
  CHECK(std::abs(gated[0]) < 1e-30F);
  CHECK(gated[6] == 200.0F);
  for (const Function& f : kFunctions) {
    CAPTURE(f.name);
    CHECK(std::isnan(values(f.operation(Tensor::full(context, {1}, DType::F32, NAN)))[0]));
  }
}

TEST_CASE("functions of one tensor: refuse integers, and detect changes in place") {
  const auto context = Context::create();
  const Tensor tokens = Tensor::empty(context, {2}, DType::I32);
  CHECK_THROWS_WITH_AS(ops::exp(tokens), "exp: x must be f64, f32 or bf16, got i32",
                       InvalidArgument);
  Tensor x = random_tensor(context, {3}, DType::F64, 1).set_requires_grad(true);
  const Tensor y = ops::silu(x);
  x.storage()->bump_version();
  CHECK_THROWS_AS(autograd::backward(y, x.detach()), InvalidArgument);
}

TEST_CASE("functions of one tensor: nothing is computed on the meta device") {
  const auto context = Context::create({.device = {DeviceType::Meta, 0}});
  Tensor x = Tensor::empty(context, {2, 3}, DType::BF16).set_requires_grad(true);
  for (const Function& f : kFunctions) {
    x.zero_grad();
    const Tensor y = f.operation(x);
    CHECK(y.shape() == Shape{2, 3});
    autograd::backward(y, Tensor::empty(context, {2, 3}, DType::BF16));
    CHECK(x.grad().shape() == Shape{2, 3});
  }
}

}  // namespace
}  // namespace tessera::test
