#include "kernels/unary.h"

#include "core/base/device_backend.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using kernels::UnaryKind;

struct Function {
  UnaryKind kind;
  double (*reference)(double x, double s);
};

const Function kFunctions[] = {
    {UnaryKind::Copy, [](double x, double) { return x; }},
    {UnaryKind::Multiply, [](double x, double s) { return x * s; }},
    {UnaryKind::Divide, [](double x, double s) { return x / s; }},
    {UnaryKind::Add, [](double x, double s) { return x + s; }},
    {UnaryKind::SubtractFrom, [](double x, double s) { return s - x; }},
    {UnaryKind::DivideInto, [](double x, double s) { return s / x; }},
    {UnaryKind::Relu, [](double x, double) { return x > 0 ? x : 0.0; }},
    {UnaryKind::Sigmoid, [](double x, double) { return 1 / (1 + std::exp(-x)); }},
    {UnaryKind::Silu, [](double x, double) { return x / (1 + std::exp(-x)); }},
    {UnaryKind::Tanh, [](double x, double) { return std::tanh(x); }},
    {UnaryKind::Exp, [](double x, double) { return std::exp(x); }},
    {UnaryKind::Log, [](double x, double) { return std::log(x); }},
    {UnaryKind::Sqrt, [](double x, double) { return std::sqrt(x); }},
};

// Above 0.1, for logarithms and roots.
std::vector<double> positive(std::int64_t n, std::uint64_t seed) {
  std::vector<double> values = Buffer::normal(n, seed);
  for (double& value : values) value = 0.1 + std::abs(value);
  return values;
}

TEST_CASE("unary computes every function") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const Function& f : kFunctions) {
      for (const std::int64_t n : kOddLengths) {
        if (n > 1000 && f.kind != UnaryKind::Exp) continue;
        CAPTURE(static_cast<int>(f.kind));
        CAPTURE(n);
        const bool any_sign = f.kind != UnaryKind::Log && f.kind != UnaryKind::Sqrt &&
                              f.kind != UnaryKind::DivideInto;
        const Buffer x(dtype, {n}, any_sign ? Buffer::normal(n, 1, 3.0) : positive(n, 1));
        const Buffer y(dtype, {n});
        kernels::unary(context, {x.view(), y.gradient(false), f.kind, 0.75});
        std::vector<double> want = x.values();
        for (double& value : want) value = f.reference(value, 0.75);
        check_close(y.values(), want, tolerance(dtype), f.kind == UnaryKind::Log ? 0.1 : 1e-6);
      }
    }
  });
}

TEST_CASE("unary reads and writes any strides, and accumulates") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const UnaryKind kind : {UnaryKind::Copy, UnaryKind::Multiply, UnaryKind::Divide}) {
      for (const bool accumulate : {false, true}) {
        CAPTURE(static_cast<int>(kind));
        CAPTURE(accumulate);
        // x [5, 3, 7] is read as its transpose [7, 3, 5], and as a row repeated 7 * 3 times.
        const Buffer x(dtype, {5, 3, 7}, Buffer::normal(105, 1)), y(dtype, {7, 3, 5}, 1.0);
        TensorView transposed = x.view(), row = x.view();
        transposed.shape = row.shape = {7, 3, 5};
        transposed.strides = {1, 7, 21};
        row.strides = {0, 0, 1};
        const auto in = x.values();
        for (const TensorView& view : {transposed, row}) {
          const auto before = y.values();
          kernels::unary(context, {view, y.gradient(accumulate), kind, 0.5});
          std::vector<double> want;
          for (std::int64_t i = 0; i < 105; ++i) {
            const std::int64_t at =
                i / 15 * view.strides[0] + i / 5 % 3 * view.strides[1] + i % 5 * view.strides[2];
            const double value = in[static_cast<std::size_t>(at)];
            const double factor =
                kind == UnaryKind::Copy ? 1.0 : (kind == UnaryKind::Multiply ? 0.5 : 2.0);
            want.push_back(factor * value +
                           (accumulate ? before[static_cast<std::size_t>(i)] : 0.0));
          }
          check_close(y.values(), want, tolerance(dtype), 3.0);
        }
      }
    }
    // Writes a column only, of rows wider than a piece.
    const std::int64_t wide = 2051;
    const Buffer x(dtype, {3}, {1, 2, 3}), y(dtype, {3, wide}, 9.0);
    TensorView column = y.view().narrow(1, wide - 1, 1);
    column.shape = {3};
    column.strides = {wide};
    kernels::unary(context, {x.view(), {column, false, true}, UnaryKind::Add, 0.5});
    std::vector<double> want(static_cast<std::size_t>(3 * wide), 9.0);
    for (std::size_t r = 0; r < 3; ++r)
      want[(r + 1) * static_cast<std::size_t>(wide) - 1] = static_cast<double>(r) + 1.5;
    CHECK(y.values() == want);
  });
}

TEST_CASE("unary copies the bits of integers") {
  for_each_context([](Context& context) {
    const std::vector<std::int32_t> values{0, -1, 1, 0x7f800001, -5, 1 << 30};
    const IndexBuffer x({2, 3}, values), y({3, 2}, std::vector<std::int32_t>(6));
    TensorView transposed = x.view();
    transposed.shape = {3, 2};
    transposed.strides = {1, 3};
    kernels::unary(context, {transposed, {y.view(), false, true}, UnaryKind::Copy});
    std::vector<std::int32_t> got(6);
    if (context.device().type == DeviceType::CUDA)
      context.backend().copy_to_host(got.data(), y.view().data, y.view().bytes());
    else
      std::memcpy(got.data(), y.view().data, y.view().bytes());
    CHECK(got == std::vector<std::int32_t>{0, 0x7f800001, -1, -5, 1, 1 << 30});
  });
}

TEST_CASE("unary is bit-identical for any number of threads") {
  const Buffer x(DType::F32, {3, 50257}, Buffer::normal(3 * 50257, 1));
  check_same_for_any_threads([&](Context& context) {
    const Buffer y(DType::F32, {3, 50257});
    kernels::unary(context, {x.view(), y.gradient(false), UnaryKind::Exp});
    return y.bytes();
  });
}

}  // namespace
}  // namespace tessera::test
