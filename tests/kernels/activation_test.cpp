#include "kernels/activation.h"

#include <limits>

#include "kernels/cuda/launch/rows.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using kernels::GatedKind;

constexpr GatedKind kKinds[] = {GatedKind::SwiGlu, GatedKind::GeGlu};
constexpr double kBefore = 0.5;

// act(x) = x / (1 + e^(-u)): SiLU with u = x, GELU with u as below.
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
  return static_cast<double>(s + (rest == 0.0L ? 0.0L : x * slope(kind, x) * s * rest));
}

std::vector<double> inputs(std::int64_t n, std::uint64_t seed) {
  auto values = Buffer::normal(n, seed, 3.0);
  const double edges[] = {0.0, -9.0, 9.0, 60.0, -60.0, 1e-30};
  for (std::size_t i = 0; i < std::size(edges) && i + 1 < values.size(); ++i)
    values[i + 1] = edges[i];
  return values;
}

// For large inputs the rounding error grows with the exponential's argument.
constexpr double kRelative = 20, kFarOut = 1e-14;

TEST_CASE("GELU matches float64 in both directions, overwriting or accumulating") {
  CHECK(act(GatedKind::GeGlu, 1.0) == doctest::Approx(0.8411919906).epsilon(1e-9));
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const std::int64_t n : kOddLengths) {
      CAPTURE(n);
      const Buffer x(dtype, {n}, inputs(n, 7)), y(dtype, {n}, -7.0);
      const Buffer grad_y(dtype, {n}, Buffer::normal(n, 8));
      kernels::gelu_forward(context, {x.view(), y.view()});
      const auto in = x.values(), upstream = grad_y.values();
      std::vector<double> want, want_grad;
      for (std::size_t i = 0; i < in.size(); ++i) {
        want.push_back(act(GatedKind::GeGlu, in[i]));
        want_grad.push_back(act_derivative(GatedKind::GeGlu, in[i]) * upstream[i]);
      }
      check_close(y.values(), want, kRelative * tolerance(dtype), kFarOut);
      for (const bool accumulate : {false, true}) {
        const Buffer grad_x(dtype, {n}, kBefore);
        kernels::gelu_backward(context, {x.view(), grad_y.view(), grad_x.gradient(accumulate)});
        if (accumulate)
          for (double& value : want_grad) value += kBefore;
        check_close(grad_x.values(), want_grad, 2 * tolerance(dtype), 1.0);
      }
    }
  });
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

/// Operands are halves of packed matrices, with `gap` columns between and after them that must stay
/// unchanged.
void check_halves(Context& context, GatedKind kind, DType dtype, std::int64_t rows,
                  std::int64_t width, std::int64_t gap, bool accumulate) {
  CAPTURE(width);
  CAPTURE(gap);
  CAPTURE(accumulate);
  CAPTURE(kind == GatedKind::SwiGlu);
  const std::int64_t half = width + gap, packed = 2 * half;
  const auto columns = [width](const Buffer& matrix, std::int64_t first) {
    TensorView view = offset(matrix.view(), first);
    view.shape[1] = width;
    return view;
  };
  const Buffer x(dtype, {rows, packed}, inputs(rows * packed, 1));
  const Buffer y(dtype, {rows, half}, 77.0);
  const TensorView gate = columns(x, 0), up = columns(x, half);
  kernels::gated_forward(context, {gate, up, columns(y, 0), kind});

  const auto gates = columns_of(x, 0, width), ups = columns_of(x, half, width);
  std::vector<double> want_y, want_gate, want_up;
  for (std::size_t i = 0; i < gates.size(); ++i) want_y.push_back(act(kind, gates[i]) * ups[i]);
  check_close(columns_of(y, 0, width), want_y, kRelative * tolerance(dtype), kFarOut);
  CHECK(columns_of(y, width, gap) ==
        std::vector<double>(static_cast<std::size_t>(rows * gap), 77.0));

  const Buffer grad_y(dtype, {rows, half}, Buffer::normal(rows * half, 2));
  const Buffer grad(dtype, {rows, packed}, kBefore), one(dtype, {rows, packed}, kBefore);
  const GradientView of_gate{columns(grad, 0), accumulate, true};
  const GradientView of_up{columns(grad, half), accumulate, true};
  kernels::gated_backward(context, {gate, up, columns(grad_y, 0), of_gate, of_up, kind});
  const auto upstream = columns_of(grad_y, 0, width);
  const double before = accumulate ? kBefore : 0.0;
  for (std::size_t i = 0; i < gates.size(); ++i) {
    want_gate.push_back(upstream[i] * ups[i] * act_derivative(kind, gates[i]) + before);
    want_up.push_back(upstream[i] * act(kind, gates[i]) + before);
  }
  check_close(columns_of(grad, 0, width), want_gate, 4 * tolerance(dtype), 10.0);
  check_close(columns_of(grad, half, width), want_up, 4 * tolerance(dtype), 10.0);
  CHECK(columns_of(grad, width, gap) ==
        std::vector<double>(static_cast<std::size_t>(rows * gap), kBefore));

  const GradientView one_gate{columns(one, 0), accumulate, true};
  const GradientView one_up{columns(one, half), accumulate, true};
  kernels::gated_backward(context, {gate, up, columns(grad_y, 0), one_gate, {}, kind});
  kernels::gated_backward(context, {gate, up, columns(grad_y, 0), {}, one_up, kind});
  CHECK(one.bytes() == grad.bytes());
}

TEST_CASE("gated units match float64 in both directions, on halves of packed rows") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const GatedKind kind : kKinds) {
      for (const bool accumulate : {false, true})
        for (const std::int64_t width : {1, 3, 31, 33, 64, 257})
          check_halves(context, kind, dtype, 3, width, 0, accumulate);
      for (const std::int64_t gap : {8, 3})          // vectorized, or element by element
        for (const std::int64_t width : {64, 2056})  // one block per row, or several
          check_halves(context, kind, dtype, 2, width, gap, false);
      check_halves(context, kind, dtype, 1, 50257, 0, true);
    }
  });
}

TEST_CASE("activations propagate a NaN and keep huge values finite") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    // CPUs compute vectors of up to 16 elements, and those from kRemainder on one by one.
    constexpr std::size_t kRemainder = 32;
    const Shape shape = {1, kRemainder + 5};
    const std::vector<double> special = {std::numeric_limits<double>::quiet_NaN(), 1e30, -1e30,
                                         1000.0, -1000.0};
    std::vector<double> values(kRemainder + special.size(), 0.0);
    for (const std::size_t first : {std::size_t{0}, kRemainder})
      std::ranges::copy(special, values.begin() + static_cast<std::ptrdiff_t>(first));
    const Buffer x(dtype, shape, values), one(dtype, shape, 1.0);
    const Buffer y(dtype, shape), grad(dtype, shape);
    const auto check = [&] {
      const auto out = y.values(), gradient = grad.values(), in = x.values();
      for (const std::size_t first : {std::size_t{0}, kRemainder}) {
        CAPTURE(first);
        CHECK(std::isnan(out[first]));
        CHECK(std::isnan(gradient[first]));
        CHECK(out[first + 1] == in[first + 1]);
        CHECK(out[first + 3] == in[first + 3]);
        CHECK(std::abs(out[first + 2]) < 0.01);
        CHECK(std::abs(out[first + 4]) < 1e-6);
        CHECK(gradient[first + 1] == 1.0);
        CHECK(std::abs(gradient[first + 2]) < 1e-6);
      }
    };
    kernels::gelu_forward(context, {x.view(), y.view()});
    kernels::gelu_backward(context, {x.view(), one.view(), grad.gradient(false)});
    check();
    for (const GatedKind kind : kKinds) {
      kernels::gated_forward(context, {x.view(), one.view(), y.view(), kind});
      kernels::gated_backward(context,
                              {x.view(), one.view(), one.view(), grad.gradient(false), {}, kind});
      check();
    }
  });
}

TEST_CASE("activations do not depend on the number of threads") {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    const Buffer x(dtype, {301, 193}, inputs(301 * 193, 4));
    check_same_for_any_threads([&](Context& context) {
      const Buffer y(dtype, {301, 193}), grad(dtype, {301, 193}), gated(dtype, {301, 193});
      kernels::gelu_forward(context, {x.view(), y.view()});
      kernels::gelu_backward(context, {x.view(), x.view(), grad.gradient(false)});
      kernels::gated_forward(context, {x.view(), x.view(), gated.view(), GatedKind::SwiGlu});
      return std::vector{y.bytes(), grad.bytes(), gated.bytes()};
    });
  }
}

TEST_CASE("rows are split into whole warps that cover them") {
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

}  // namespace
}  // namespace tessera::test
