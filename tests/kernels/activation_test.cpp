#include "kernels/activation.h"

#include <limits>

#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

long double inner(long double x) { return 0.79788456080286535588L * (x + 0.044715L * x * x * x); }

double gelu(long double x) { return static_cast<double>(x / (1.0L + std::exp(-2.0L * inner(x)))); }

double gelu_derivative(long double x) {
  const long double slope = 0.79788456080286535588L * (1.0L + 3.0L * 0.044715L * x * x);
  const long double cosh = std::cosh(inner(x));
  const long double tail = std::isinf(cosh) ? 0.0L : 0.5L * x * slope / (cosh * cosh);
  return static_cast<double>(1.0L / (1.0L + std::exp(-2.0L * inner(x))) + tail);
}

std::vector<double> inputs(std::int64_t n) {
  auto values = Buffer::normal(n, 7, 3.0);
  const double edges[] = {0.0, -9.0, 9.0, 100.0, -100.0, 1e-30};
  for (std::size_t i = 0; i < std::size(edges) && i + 1 < values.size(); ++i)
    values[i + 1] = edges[i];
  return values;
}

template <typename F>
std::vector<double> map(const std::vector<double>& values, F&& f) {
  std::vector<double> result;
  for (const double value : values) result.push_back(f(static_cast<long double>(value)));
  return result;
}

// Far out the exponential's argument is large, and its rounding error grows with it; beyond -9.5
// the kernel's result stays near 1e-32.
constexpr double kRelative = 8;
constexpr double kFarOut = 1e-15;

TEST_CASE("GELU forward matches float64") {
  CHECK(gelu(1.0L) == doctest::Approx(0.8411919906).epsilon(1e-9));
  CHECK(gelu(-1.0L) == doctest::Approx(-0.1588080094).epsilon(1e-9));
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const std::int64_t n : kOddLengths) {
        CAPTURE(dtype_name(dtype));
        CAPTURE(n);
        const Buffer x(dtype, {n}, inputs(n));
        const Buffer y(dtype, {n}, -7.0);
        kernels::gelu_forward(context, {x.view(), y.view()});
        check_close(y.values(), map(x.values(), gelu), kRelative * tolerance(dtype), kFarOut);
      }
    }
  });
}

TEST_CASE("GELU backward matches float64, overwriting or adding") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const bool accumulate : {false, true}) {
        for (const std::int64_t n : kOddLengths) {
          CAPTURE(dtype_name(dtype));
          CAPTURE(accumulate);
          CAPTURE(n);
          const Buffer x(dtype, {n}, inputs(n));
          const Buffer grad_y(dtype, {n}, Buffer::normal(n, 8));
          const Buffer grad_x(dtype, {n}, 0.5);
          kernels::gelu_backward(context, {x.view(), grad_y.view(), grad_x.gradient(accumulate)});
          auto want = map(x.values(), gelu_derivative);
          const auto upstream = grad_y.values();
          for (std::size_t i = 0; i < want.size(); ++i)
            want[i] = want[i] * upstream[i] + (accumulate ? 0.5 : 0.0);
          check_close(grad_x.values(), want, 2 * tolerance(dtype), 1.0);
        }
      }
    }
  });
}

TEST_CASE("GELU does not depend on the number of threads") {
  constexpr std::int64_t kSize = 50001;
  for (const DType dtype : {DType::F32, DType::BF16}) {
    CAPTURE(dtype_name(dtype));
    const Buffer x(dtype, {kSize}, inputs(kSize));
    std::vector<char> first_y, first_grad;
    for (const int threads : {1, 2, 3}) {
      const auto context = Context::create({.threads = threads});
      const Buffer y(dtype, {kSize});
      const Buffer grad(dtype, {kSize});
      kernels::gelu_forward(*context, {x.view(), y.view()});
      kernels::gelu_backward(*context, {x.view(), x.view(), grad.gradient(false)});
      if (threads == 1) {
        first_y = y.bytes();
        first_grad = grad.bytes();
        check_close(y.values(), map(x.values(), gelu), kRelative * tolerance(dtype), kFarOut);
      }
      CHECK(y.bytes() == first_y);
      CHECK(grad.bytes() == first_grad);
    }
  }
}

TEST_CASE("GELU hands a NaN on and keeps huge values finite") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      const double nan = std::numeric_limits<double>::quiet_NaN();
      const Buffer x(dtype, {4}, {nan, 1e30, -1e30, 1.0});
      const Buffer one(dtype, {4}, 1.0);
      const Buffer y(dtype, {4}), grad(dtype, {4});
      kernels::gelu_forward(context, {x.view(), y.view()});
      kernels::gelu_backward(context, {x.view(), one.view(), grad.gradient(false)});
      CHECK(std::isnan(y.values()[0]));
      CHECK(std::isnan(grad.values()[0]));
      CHECK(y.values()[1] == x.values()[1]);
      CHECK(std::abs(y.values()[2]) < 0.01);
      CHECK(grad.values()[1] == 1.0);
      CHECK(std::abs(grad.values()[2]) < 1e-6);
      CHECK(y.values()[3] == doctest::Approx(0.8412).epsilon(0.01));
    }
  });
}

TEST_CASE("GELU refuses what does not fit") {
  const auto context = Context::create();
  const Buffer x(DType::F32, {2, 3}), other(DType::F32, {3, 2}), half(DType::BF16, {2, 3});
  CHECK_THROWS_WITH_AS(kernels::gelu_forward(*context, {x.view(), other.view()}),
                       "gelu_forward: y must have shape [2, 3], got [3, 2]", InvalidArgument);
  CHECK_THROWS_WITH_AS(kernels::gelu_forward(*context, {x.view(), half.view()}),
                       "gelu_forward: y must have dtype f32, got bf16", InvalidArgument);
  TensorView strided = x.view();
  strided.strides = {1, 2};
  CHECK_THROWS_WITH_AS(
      kernels::gelu_backward(*context, {strided, x.view(), {x.view(), false, true}}),
      "gelu_backward: x must be contiguous, got shape [2, 3] with strides [1, 2]", InvalidArgument);
  std::int64_t numbers[6] = {};
  const TensorView integers = dense_view(numbers, DType::I64, {2, 3});
  CHECK_THROWS_WITH_AS(kernels::gelu_forward(*context, {integers, integers}),
                       "gelu_forward: x must have dtype f32, bf16 or f64, got i64", Unsupported);
  const auto meta = Context::create({.device = {DeviceType::Meta, 0}});
  CHECK_THROWS_WITH_AS(kernels::gelu_forward(*meta, {x.view(), x.view()}),
                       "gelu_forward: x is on cpu, the context on meta", InvalidArgument);
}

TEST_CASE("GELU on the meta device checks and computes nothing") {
  const auto meta = Context::create({.device = {DeviceType::Meta, 0}});
  const TensorView x = dense_view(nullptr, DType::F32, {4, 5}, meta->device());
  CHECK_NOTHROW(kernels::gelu_forward(*meta, {x, x}));
  const TensorView y = dense_view(nullptr, DType::F32, {4, 6}, meta->device());
  CHECK_THROWS_AS(kernels::gelu_forward(*meta, {x, y}), InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
