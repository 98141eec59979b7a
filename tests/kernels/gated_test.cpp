#include <limits>

#include "kernels/activation.h"
#include "kernels/cuda/launch/rows.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using kernels::GatedKind;

constexpr GatedKind kKinds[] = {GatedKind::SwiGlu, GatedKind::GeGlu};

// 2 u in act(x) = x / (1 + e^(-2 u)), and its slope.
long double exponent(GatedKind kind, long double x) {
  if (kind == GatedKind::SwiGlu) return x;
  return 2.0L * 0.79788456080286535588L * (x + 0.044715L * x * x * x);
}
long double slope(GatedKind kind, long double x) {
  if (kind == GatedKind::SwiGlu) return 1.0L;
  return 2.0L * 0.79788456080286535588L * (1.0L + 3.0L * 0.044715L * x * x);
}
double act(GatedKind kind, double gate) {
  const auto x = static_cast<long double>(gate);
  return static_cast<double>(x / (1.0L + std::exp(-exponent(kind, x))));
}
double act_derivative(GatedKind kind, double gate) {
  const auto x = static_cast<long double>(gate);
  const long double e = exponent(kind, x);
  const long double s = 1.0L / (1.0L + std::exp(-e)), rest = 1.0L / (1.0L + std::exp(e));
  return static_cast<double>(s + x * slope(kind, x) * s * rest);
}

std::vector<double> inputs(std::int64_t n, std::uint64_t seed) {
  auto values = Buffer::normal(n, seed, 3.0);
  const double edges[] = {0.0, -9.0, 9.0, 60.0, -60.0, 1e-30};
  for (std::size_t i = 0; i < std::size(edges) && i + 1 < values.size(); ++i)
    values[i + 1] = edges[i];
  return values;
}

/// Rows of `width` elements that begin at column `first` of a wider matrix.
TensorView columns(const TensorView& matrix, std::int64_t first, std::int64_t width) {
  TensorView view = matrix;
  view.data =
      static_cast<char*>(matrix.data) + static_cast<std::size_t>(first) * dtype_size(matrix.dtype);
  view.shape[1] = width;
  return view;
}

std::vector<double> columns_of(const Buffer& matrix, std::int64_t first, std::int64_t width) {
  const auto all = matrix.values();
  std::vector<double> result;
  for (std::int64_t r = 0; r < matrix.view().shape[0]; ++r) {
    const auto row = all.begin() + r * matrix.view().shape[1] + first;
    result.insert(result.end(), row, row + width);
  }
  return result;
}

/// Operands as halves of packed matrices, with `gap` columns between and after them that nothing
/// may touch.
void check_halves(Context& context, GatedKind kind, DType dtype, std::int64_t rows,
                  std::int64_t width, std::int64_t gap, bool accumulate) {
  CAPTURE(dtype_name(dtype));
  CAPTURE(width);
  CAPTURE(gap);
  CAPTURE(accumulate);
  CAPTURE(kind == GatedKind::SwiGlu);
  const std::int64_t half = width + gap, packed = 2 * half;
  const Buffer x(dtype, {rows, packed}, inputs(rows * packed, 1));
  const Buffer y(dtype, {rows, half}, 77.0);
  const TensorView gate = columns(x.view(), 0, width), up = columns(x.view(), half, width);
  kernels::gated_forward(context, {gate, up, columns(y.view(), 0, width), kind});

  const auto gates = columns_of(x, 0, width), ups = columns_of(x, half, width);
  std::vector<double> want_y, want_gate, want_up;
  for (std::size_t i = 0; i < gates.size(); ++i) want_y.push_back(act(kind, gates[i]) * ups[i]);
  // Far out the exponential's argument is large, and its rounding error grows with it.
  check_close(columns_of(y, 0, width), want_y, 20 * tolerance(dtype), 1e-14);
  CHECK(columns_of(y, width, gap) ==
        std::vector<double>(static_cast<std::size_t>(rows * gap), 77.0));

  const Buffer grad_y(dtype, {rows, half}, Buffer::normal(rows * half, 2));
  const Buffer grad(dtype, {rows, packed}, 0.5);
  kernels::gated_backward(context, {gate,
                                    up,
                                    columns(grad_y.view(), 0, width),
                                    {columns(grad.view(), 0, width), accumulate, true},
                                    {columns(grad.view(), half, width), accumulate, true},
                                    kind});
  const auto upstream = columns_of(grad_y, 0, width);
  const double before = accumulate ? 0.5 : 0.0;
  for (std::size_t i = 0; i < gates.size(); ++i) {
    want_gate.push_back(upstream[i] * ups[i] * act_derivative(kind, gates[i]) + before);
    want_up.push_back(upstream[i] * act(kind, gates[i]) + before);
  }
  check_close(columns_of(grad, 0, width), want_gate, 4 * tolerance(dtype), 10.0);
  check_close(columns_of(grad, half, width), want_up, 4 * tolerance(dtype), 10.0);
  CHECK(columns_of(grad, width, gap) ==
        std::vector<double>(static_cast<std::size_t>(rows * gap), 0.5));
}

TEST_CASE("gated units match float64 in both directions, on halves of packed rows") {
  for_each_context([](Context& context) {
    for (const GatedKind kind : kKinds)
      for (const DType dtype : kComputingDTypes)
        for (const bool accumulate : {false, true})
          for (const std::int64_t width : {1, 3, 31, 33, 64, 257})
            check_halves(context, kind, dtype, 3, width, 0, accumulate);
  });
}

TEST_CASE("gated units match float64 in a row as wide as a vocabulary") {
  for_each_context([](Context& context) {
    for (const GatedKind kind : kKinds)
      for (const DType dtype : kComputingDTypes)
        check_halves(context, kind, dtype, 1, 50257, 0, true);
  });
}

TEST_CASE("gated units touch nothing between strided rows, in packs or element by element") {
  for_each_context([](Context& context) {
    for (const GatedKind kind : kKinds)
      for (const DType dtype : kComputingDTypes)
        for (const std::int64_t gap : {8, 3})
          for (const std::int64_t width : {64, 2056})  // one block for a row, and more
            check_halves(context, kind, dtype, 2, width, gap, false);
  });
}

TEST_CASE("gated units skip a gradient that nobody wants") {
  for_each_context([](Context& context) {
    const Buffer x(DType::F32, {2, 40}, inputs(80, 3)), one(DType::F32, {2, 40}, 1.0);
    const Buffer both_gate(DType::F32, {2, 40}), both_up(DType::F32, {2, 40});
    const Buffer gate(DType::F32, {2, 40}), up(DType::F32, {2, 40});
    const auto run = [&](const GradientView& of_gate, const GradientView& of_up) {
      kernels::gated_backward(
          context, {x.view(), one.view(), one.view(), of_gate, of_up, GatedKind::SwiGlu});
    };
    run(both_gate.gradient(false), both_up.gradient(false));
    run(gate.gradient(false), {});
    run({}, up.gradient(false));
    CHECK_NOTHROW(run({}, {}));
    CHECK(gate.bytes() == both_gate.bytes());
    CHECK(up.bytes() == both_up.bytes());
  });
}

TEST_CASE("gated units hand a NaN on and keep huge gates finite") {
  for_each_context([](Context& context) {
    for (const GatedKind kind : kKinds) {
      for (const DType dtype : kComputingDTypes) {
        const double nan = std::numeric_limits<double>::quiet_NaN();
        const Buffer gate(dtype, {1, 5}, {nan, 1e30, -1e30, 1000.0, -1000.0});
        const Buffer one(dtype, {1, 5}, 1.0);
        const Buffer y(dtype, {1, 5}), grad_gate(dtype, {1, 5}), grad_up(dtype, {1, 5});
        kernels::gated_forward(context, {gate.view(), one.view(), y.view(), kind});
        kernels::gated_backward(context,
                                {gate.view(), one.view(), one.view(), grad_gate.gradient(false),
                                 grad_up.gradient(false), kind});
        CHECK(std::isnan(y.values()[0]));
        CHECK(std::isnan(grad_gate.values()[0]));
        CHECK(std::isnan(grad_up.values()[0]));
        CHECK(y.values()[1] == gate.values()[1]);
        CHECK(y.values()[3] == gate.values()[3]);
        CHECK(std::abs(y.values()[2]) < 0.01);
        CHECK(std::abs(y.values()[4]) < 1e-6);
        CHECK(grad_gate.values()[1] == 1.0);
        CHECK(std::abs(grad_gate.values()[2]) < 1e-6);
      }
    }
  });
}

TEST_CASE("gated units do not depend on the number of threads") {
  const std::int64_t rows = 301, width = 193;
  const Buffer x(DType::F32, {rows, width}, inputs(rows * width, 4));
  std::vector<char> first;
  for (const int threads : {1, 2, 3}) {
    const auto context = Context::create({.threads = threads});
    const Buffer y(DType::F32, {rows, width});
    kernels::gated_forward(*context, {x.view(), x.view(), y.view(), GatedKind::SwiGlu});
    if (first.empty()) first = y.bytes();
    CHECK(y.bytes() == first);
  }
}

TEST_CASE("rows are cut into whole warps that cover them") {
  using kernels::cuda::RowsShape;
  for (const std::int64_t packs : {1, 32, 33, 256, 257, 1376, 1 << 20}) {
    CAPTURE(packs);
    const RowsShape shape(packs);
    CHECK(shape.threads % 32 == 0);
    CHECK(shape.threads <= RowsShape::kMostThreads);
    CHECK(std::int64_t{shape.threads} * shape.parts >= packs);
  }
  CHECK(RowsShape(1376).parts == 6);
  CHECK(RowsShape(std::int64_t{1} << 40).parts == RowsShape::kMostParts);
}

TEST_CASE("gated units refuse what does not fit") {
  const auto context = Context::create();
  const Buffer x(DType::F32, {2, 3}), other(DType::F32, {3, 2}), half(DType::BF16, {2, 3});
  CHECK_THROWS_WITH_AS(kernels::gated_forward(*context, {x.view(), other.view(), x.view()}),
                       "gated_forward: up must have shape [2, 3], got [3, 2]", InvalidArgument);
  CHECK_THROWS_WITH_AS(kernels::gated_forward(*context, {x.view(), x.view(), half.view()}),
                       "gated_forward: y must have dtype f32, got bf16", InvalidArgument);
  TensorView strided = x.view();
  strided.strides = {1, 2};
  CHECK_THROWS_WITH_AS(
      kernels::gated_backward(*context,
                              {x.view(), x.view(), strided, x.gradient(false), {}, kKinds[0]}),
      "gated_backward: the last dim of grad_y must be contiguous, got shape [2, 3] with strides "
      "[1, 2]",
      InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
