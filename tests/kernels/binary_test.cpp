#include "kernels/binary.h"

#include "kernels/strided.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using kernels::BinaryKind;

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

struct Function {
  BinaryKind kind;
  double (*reference)(double a, double b);
};

const Function kFunctions[] = {
    {BinaryKind::Add, [](double a, double b) { return a + b; }},
    {BinaryKind::Subtract, [](double a, double b) { return a - b; }},
    {BinaryKind::Multiply, [](double a, double b) { return a * b; }},
    {BinaryKind::Divide, [](double a, double b) { return a / b; }},
    {BinaryKind::ReluGradient, [](double a, double b) { return a > 0 ? b : 0.0; }},
    {BinaryKind::SigmoidGradient, [](double a, double b) { return a * (1 - a) * b; }},
    {BinaryKind::SiluGradient,
     [](double a, double b) {
       const double s = logistic(a);
       return b * (s + a * s * (1 - s));
     }},
    {BinaryKind::TanhGradient, [](double a, double b) { return (1 - a * a) * b; }},
    {BinaryKind::ReciprocalGradient, [](double a, double b) { return b / (a * a); }},
};

TEST_CASE("binary computes every function, scaled and accumulated") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const Function& f : kFunctions) {
      for (const std::int64_t n : kOddLengths) {
        if (n > 1000 && f.kind != BinaryKind::SiluGradient) continue;
        for (const bool accumulate : {false, true}) {
          CAPTURE(static_cast<int>(f.kind));
          CAPTURE(n);
          CAPTURE(accumulate);
          std::vector<double> left = Buffer::normal(n, 1), right = Buffer::normal(n, 2);
          for (double& value : left) value += value < 0 ? -0.5 : 0.5;
          for (double& value : right) value += value < 0 ? -0.5 : 0.5;
          const Buffer a(dtype, {n}, left), b(dtype, {n}, right), y(dtype, {n}, 1.0);
          kernels::binary(context, {a.view(), b.view(), y.gradient(accumulate), f.kind, -0.5});
          left = a.values();
          right = b.values();
          std::vector<double> want;
          for (std::size_t i = 0; i < left.size(); ++i)
            want.push_back(-0.5 * f.reference(left[i], right[i]) + (accumulate ? 1.0 : 0.0));
          check_close(y.values(), want, tolerance(dtype), 4.0);
        }
      }
    }
  });
}

TEST_CASE("binary broadcasts either operand, and works in place") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    const Shape shape{4, 3, 5};
    const Buffer whole(dtype, shape, Buffer::normal(60, 1));
    const std::vector<double> full = whole.values();
    for (const Shape& part : {Shape{5}, Shape{3, 1}, Shape{4, 1, 1}, Shape{}, Shape{1, 3, 5}}) {
      for (const bool swapped : {false, true}) {
        CAPTURE(part.str());
        CAPTURE(swapped);
        const Buffer few(dtype, part, Buffer::normal(numel(part), 2)), y(dtype, shape);
        const TensorView repeated = kernels::broadcast(few.view(), shape);
        kernels::binary(context,
                        {swapped ? repeated : whole.view(), swapped ? whole.view() : repeated,
                         y.gradient(false), BinaryKind::Subtract});
        const auto values = few.values();
        std::vector<double> want;
        for (std::int64_t i = 0; i < 60; ++i) {
          const std::int64_t at = i / 15 * repeated.strides[0] + i / 5 % 3 * repeated.strides[1] +
                                  i % 5 * repeated.strides[2];
          const double difference =
              full[static_cast<std::size_t>(i)] - values[static_cast<std::size_t>(at)];
          want.push_back(swapped ? -difference : difference);
        }
        check_close(y.values(), want, tolerance(dtype));
      }
    }
    kernels::binary(context,
                    {whole.view(), whole.view(), whole.gradient(false), BinaryKind::Divide});
    CHECK(whole.values() == std::vector<double>(60, 1.0));
  });
}

TEST_CASE("binary is bit-identical for any number of threads") {
  const Buffer a(DType::F32, {31, 5003}, Buffer::normal(31 * 5003, 1));
  const Buffer b(DType::F32, {5003}, Buffer::normal(5003, 2));
  check_same_for_any_threads([&](Context& context) {
    const Buffer y(DType::F32, {31, 5003}, 1.0);
    kernels::binary(context, {a.view(), kernels::broadcast(b.view(), {31, 5003}), y.gradient(true),
                              BinaryKind::SiluGradient});
    return y.bytes();
  });
}

TEST_CASE("a strided loop merges dims where it can, and leaves out dims of size 1") {
  const auto dims = [](const Shape& shape, const Strides& strides) {
    const TensorView view{nullptr, DType::F32, shape, strides, {}};
    const kernels::StridedLoop loop = kernels::strided_loop({&view});
    CHECK(loop.count() == numel(shape));
    return loop.dims;
  };
  CHECK(dims({2, 3, 4}, {12, 4, 1}) == 1);
  CHECK(dims({2, 1, 4}, {4, 99, 1}) == 1);
  CHECK(dims({2, 3, 4}, {0, 0, 0}) == 1);
  CHECK(dims({2, 3, 4}, {12, 4, 2}) == 2);
  CHECK(dims({2, 3, 4}, {0, 4, 1}) == 2);
  CHECK(dims({4, 3, 2}, {1, 4, 12}) == 3);
  CHECK(dims({}, {}) == 1);
  CHECK(dims({1, 1}, {0, 0}) == 1);
  CHECK(dims({3, 0, 2}, {0, 2, 1}) <= 2);
}

}  // namespace
}  // namespace tessera::test
