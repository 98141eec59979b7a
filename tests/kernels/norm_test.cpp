#include "kernels/norm.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "core/base/memory.h"
#include "kernels/elementwise.h"
#include "kernels/scratch.h"
#include "tests/kernels/kernel_support.h"
#include "tests/support/paths.h"

namespace tessera::test {
namespace {

using Values = std::vector<double>;

constexpr double kEps = 1e-5, kBefore = 0.5;

struct Case {
  bool layer;  ///< layer norm, else RMS norm: no mean, no bias
  DType dtype;
  std::int64_t rows, width;
  double offset = 0;
  DType sums() const { return accumulator_dtype(dtype); }
};

/// Operands rounded to the dtype. Backward gets an unrelated mean and rstd, since those of x cancel
/// its terms in short rows.
struct Inputs : Case {
  explicit Inputs(const Case& c)
      : Case(c),
        x(rounded(dtype, Buffer::normal(rows * width, 1, 2.0, 0.5))),
        residual(rounded(dtype, Buffer::normal(rows * width, 2, 1.5))),
        weight(rounded(dtype, Buffer::normal(width, 3))),
        bias(rounded(dtype, Buffer::normal(width, 4))),
        grad_y(rounded(dtype, Buffer::normal(rows * width, 5))),
        mean(rounded(sums(), Buffer::normal(rows, 6, 0.1, 0.5))),
        rstd(rounded(sums(), Buffer::normal(rows, 7, 0.05, 0.5))) {}
  Values x, residual, weight, bias, grad_y, mean, rstd;
};

/// Reference in long double.
struct Expected {
  Values y, mean, rstd, grad_x, grad_weight, grad_bias;

  explicit Expected(const Inputs& in) {
    const auto columns = static_cast<std::size_t>(in.width);
    const auto count = static_cast<long double>(in.width);
    grad_weight.resize(columns);
    grad_bias.resize(columns);
    for (std::size_t r = 0; r < static_cast<std::size_t>(in.rows); ++r) {
      const double *x = in.x.data() + r * columns, *grad = in.grad_y.data() + r * columns;
      long double center = 0, squares = 0;
      for (std::size_t c = 0; in.layer && c < columns; ++c)
        center += static_cast<long double>(x[c]) / count;
      for (std::size_t c = 0; c < columns; ++c) squares += (x[c] - center) * (x[c] - center);
      const long double scale = 1.0L / std::sqrt(squares / count + static_cast<long double>(kEps));
      mean.push_back(static_cast<double>(center));
      rstd.push_back(static_cast<double>(scale));
      for (std::size_t c = 0; c < columns; ++c)
        y.push_back(static_cast<double>((in.weight[c] + in.offset) * (x[c] - center) * scale +
                                        (in.layer ? in.bias[c] : 0.0)));

      const long double m = in.layer ? in.mean[r] : 0.0, s = in.rstd[r];
      long double mean_g = 0, mean_gn = 0;
      for (std::size_t c = 0; c < columns; ++c) {
        const long double n = (x[c] - m) * s,
                          g = static_cast<long double>(in.weight[c] + in.offset) * grad[c];
        if (in.layer) mean_g += g / count;
        mean_gn += g * n / count;
        grad_weight[c] += static_cast<double>(grad[c] * n);
        grad_bias[c] += grad[c];
      }
      for (std::size_t c = 0; c < columns; ++c) {
        const long double n = (x[c] - m) * s,
                          g = static_cast<long double>(in.weight[c] + in.offset) * grad[c];
        grad_x.push_back(static_cast<double>(s * (g - mean_g - n * mean_gn)));
      }
    }
  }
};

struct Forward {
  explicit Forward(const Inputs& in)
      : x(in.dtype, {in.rows, in.width}, in.x),
        residual(in.dtype, {in.rows, in.width}, in.residual),
        weight(in.dtype, {in.width}, in.weight),
        bias(in.dtype, {in.width}, in.bias),
        sum(in.dtype, {in.rows, in.width}, 77.0),
        y(in.dtype, {in.rows, in.width}, 77.0),
        mean(in.sums(), {in.rows}),
        rstd(in.sums(), {in.rows}),
        layer(in.layer),
        offset(in.offset) {}

  void run(Context& context, const TensorView& from, const TensorView& added = {},
           const TensorView& to = {}) const {
    kernels::NormForward args{.x = from,
                              .weight = weight.view(),
                              .y = y.view(),
                              .rstd = rstd.view(),
                              .eps = kEps,
                              .residual = added,
                              .sum = to,
                              .offset = offset};
    if (!layer) return kernels::rms_norm_forward(context, args);
    args.bias = bias.view();
    args.mean = mean.view();
    kernels::layer_norm_forward(context, args);
  }
  std::array<std::vector<char>, 3> bytes() const { return {y.bytes(), mean.bytes(), rstd.bytes()}; }
  Buffer x, residual, weight, bias, sum, y, mean, rstd;
  bool layer;
  double offset;
};

struct Gradients {
  std::array<Values, 4> values;  ///< of x, weight, bias; sums of the first over rows
  std::array<std::vector<char>, 4> bytes;
  std::int64_t scratch = 0;
};

/// @param apart  separate calls for the gradient of x and for those of the parameters
/// @param sums  also sums the gradient of x
Gradients backward(Context& context, const Inputs& in, bool accumulate, bool apart = false,
                   bool sums = false) {
  const Buffer x(in.dtype, {in.rows, in.width}, in.x), weight(in.dtype, {in.width}, in.weight);
  const Buffer grad_y(in.dtype, {in.rows, in.width}, in.grad_y);
  const Buffer mean(in.sums(), {in.rows}, in.mean), rstd(in.sums(), {in.rows}, in.rstd);
  const Buffer grad_x(in.dtype, {in.rows, in.width}, kBefore);
  const Buffer grad_weight(in.sums(), {in.width}, kBefore),
      grad_bias(in.sums(), {in.width}, kBefore), grad_sums(in.sums(), {in.width}, kBefore);
  context.ledger().reset_peaks();
  const auto run = [&](bool input, bool parameters) {
    const auto wanted = [&](const Buffer& of, bool is) {
      return is ? of.gradient(accumulate) : GradientView{};
    };
    const kernels::NormBackward args{.x = x.view(),
                                     .weight = weight.view(),
                                     .mean = in.layer ? mean.view() : TensorView{},
                                     .rstd = rstd.view(),
                                     .grad_y = grad_y.view(),
                                     .grad_x = wanted(grad_x, input),
                                     .grad_weight = wanted(grad_weight, parameters),
                                     .grad_bias = wanted(grad_bias, in.layer && parameters),
                                     .offset = in.offset,
                                     .grad_x_sums = wanted(grad_sums, input && sums)};
    if (in.layer)
      kernels::layer_norm_backward(context, args);
    else
      kernels::rms_norm_backward(context, args);
    return kernels::cuda::scratch_bytes(context.limits(), args);
  };
  const std::size_t planned = std::max(apart ? run(true, false) : 0, run(!apart, true));
  const MemoryUsage scratch = context.ledger().usage(MemoryCategory::Workspace);
  CHECK(scratch.current == 0);
  if (context.device().type == DeviceType::CUDA)
    CHECK(scratch.peak == static_cast<std::int64_t>(planned));
  return {{grad_x.values(), grad_weight.values(), grad_bias.values(), grad_sums.values()},
          {grad_x.bytes(), grad_weight.bytes(), grad_bias.bytes(), grad_sums.bytes()},
          scratch.peak};
}

void check_forward(Context& context, const Inputs& in, const Expected& want) {
  // A row sum's rounding error grows with the width.
  const double long_row = in.width > 50000 ? 8.0 : in.width >= 4096 ? 4.0 : 1.0;
  const Forward plain(in), fused(in), separate(in), over_x(in), over_residual(in);
  plain.run(context, plain.x.view());
  check_close(plain.y.values(), want.y, long_row * tolerance(in.dtype), 3.0);
  check_close(plain.rstd.values(), want.rstd, long_row * tolerance(in.sums()), 1.0);
  if (in.layer) check_close(plain.mean.values(), want.mean, long_row * tolerance(in.sums()), 1.0);

  // With a residual: bit-identical to addition and norm, also in place.
  kernels::add(context, separate.x.view(), separate.residual.view(), separate.sum.view());
  separate.run(context, separate.sum.view());
  const auto bytes = separate.bytes();
  fused.run(context, fused.x.view(), fused.residual.view(), fused.sum.view());
  over_x.run(context, over_x.x.view(), over_x.residual.view(), over_x.x.view());
  over_residual.run(context, over_residual.x.view(), over_residual.residual.view(),
                    over_residual.residual.view());
  for (const Forward* with : {&fused, &over_x, &over_residual}) CHECK(with->bytes() == bytes);
  for (const Buffer* sum : {&fused.sum, &over_x.x, &over_residual.residual})
    CHECK(sum->bytes() == separate.sum.bytes());
}

void check_backward(Context& context, const Inputs& in, const Expected& want) {
  for (const bool accumulate : {false, true}) {
    for (const int way : {0, 1, 2, 3}) {
      const bool apart = way % 2 == 1, sums = way >= 2;
      CAPTURE(accumulate);
      CAPTURE(apart);
      CAPTURE(sums);
      const Gradients got = backward(context, in, accumulate, apart, sums);
      const auto check = [&](const Values& values, Values expected, DType dtype, double magnitude) {
        if (accumulate)
          for (double& value : expected) value += kBefore;
        check_close(values, expected, tolerance(dtype), magnitude);
      };
      check(got.values[0], want.grad_x, in.dtype, 3.0);
      check(got.values[1], want.grad_weight, in.sums(), 30.0);
      if (in.layer) check(got.values[2], want.grad_bias, in.sums(), 30.0);
      if (!sums) continue;
      // Terms may have been rounded to the dtype, and may cancel.
      Values total(want.grad_weight.size(),
                   accumulate ? static_cast<double>(in.rows) * kBefore : 0);
      for (std::size_t i = 0; i < want.grad_x.size(); ++i)
        total[i % total.size()] += want.grad_x[i];
      check(got.values[3], total, in.dtype, 30.0);
    }
  }
}

struct Size {
  std::int64_t rows, width;
};

// Vectorized rows kept by a warp, kept by a block, reread; scalar rows. Gradients: teams of 1 to 16
// warps with 1 to 4 vectors per thread, several steps per block; rows that need two passes.
constexpr Size kSizes[] = {{75, 1},   {75, 3},    {75, 31},   {75, 33},  {20, 257},
                           {1, 8},    {75, 64},   {9, 264},   {70, 768}, {33, 1032},
                           {5, 1030}, {19, 1600}, {9, 2304},  {9, 4096}, {5, 8192},
                           {2, 8200}, {2, 12288}, {3, 16384}, {1, 50257}};

TEST_CASE("norms match float64 in both directions, with and without a residual") {
  for (const bool layer : {true, false}) {
    for (const DType dtype : kComputingDTypes) {
      for (const Size size : kSizes) {
        CAPTURE(layer);
        CAPTURE(dtype_name(dtype));
        CAPTURE(size.rows);
        CAPTURE(size.width);
        const double offset = size.rows % 2 == 1 ? 1 : 0;
        const Inputs in({layer, dtype, size.rows, size.width, offset});
        const Expected want(in);
        for_each_context([&](Context& context) {
          check_forward(context, in, want);
          check_backward(context, in, want);
        });
      }
    }
  }
}

TEST_CASE("norms accept misaligned rows") {
  for_each_context([](Context& context) {
    const Inputs in({true, DType::F32, 3, 64});
    const Forward aligned(in), shifted(in);
    Values behind = in.x;
    behind.insert(behind.begin(), 7.0);
    const Buffer wide(DType::F32, {3 * 64 + 1}, behind);
    const TensorView x =
        dense_view(offset(wide.view(), 1).data, DType::F32, {3, 64}, context.device());
    aligned.run(context, aligned.x.view());
    shifted.run(context, x);
    check_close(shifted.y.values(), aligned.y.values(), tolerance(DType::F32), 3.0);
    const Buffer grad_x(DType::F32, {3, 64}), want_x(DType::F32, {3, 64});
    const Buffer grad_weight(DType::F32, {64}), want_weight(DType::F32, {64});
    const auto run = [&](const TensorView& from, const Buffer& to_x, const Buffer& to_weight) {
      kernels::layer_norm_backward(context, {from,
                                             aligned.weight.view(),
                                             aligned.mean.view(),
                                             aligned.rstd.view(),
                                             from,
                                             to_x.gradient(false),
                                             to_weight.gradient(false),
                                             {}});
    };
    run(aligned.x.view(), want_x, want_weight);
    run(x, grad_x, grad_weight);
    check_close(grad_x.values(), want_x.values(), tolerance(DType::F32), 3.0);
    check_close(grad_weight.values(), want_weight.values(), tolerance(DType::F32), 10.0);
  });
}

TEST_CASE("layer norm's variance does not cancel far from zero") {
  for_each_context([](Context& context) {
    Inputs in({true, DType::F32, 1, 64});
    in.x = rounded(DType::F32, Buffer::normal(64, 11, 0.1, 1000.0));
    const Forward norm(in);
    norm.run(context, norm.x.view());
    check_close(norm.rstd.values(), Expected(in).rstd, 1e-5);
  });
}

TEST_CASE("a norm's gradients do not cancel far from zero") {
  Inputs in({true, DType::F32, 40, 768});
  in.x = rounded(DType::F32, Buffer::normal(40 * 768, 11, 1.0, 1000.0));
  in.mean = rounded(DType::F32, Buffer::normal(40, 12, 0.1, 1000.0));
  const Expected want(in);
  for_each_context([&](Context& context) { check_backward(context, in, want); });
}

TEST_CASE("norms are bit-identical for any number of threads, and in every call on a device") {
  for (const bool layer : {true, false}) {
    const Inputs in({layer, DType::F32, 300, 193});
    check_same_for_any_threads([&](Context& context) {
      const Forward norm(in);
      norm.run(context, norm.x.view());
      return std::pair(norm.bytes(), backward(context, in, false, false, true).bytes);
    });
  }
  for_each_cuda_context([](Context& context) {
    const Inputs in({true, DType::BF16, 150, 264});
    for (const bool sums : {false, true})
      CHECK(backward(context, in, true, false, sums).bytes ==
            backward(context, in, true, false, sums).bytes);
  });
}

TEST_CASE("norms write parameter gradients even without rows") {
  for_each_context([](Context& context) {
    for (const bool layer : {true, false}) {
      const Inputs none({layer, DType::F32, 0, 3});
      const Forward norm(none);
      norm.run(context, norm.x.view());
      const Gradients got = backward(context, none, false, false, true);
      CHECK(got.values[1] == Values(3, 0.0));
      CHECK(got.values[3] == Values(3, 0.0));
      CHECK(got.values[2] == Values(3, layer ? 0.0 : kBefore));
    }
  });
}

TEST_CASE("a norm gradient's scratch is one sum per block and column, and is booked") {
  if (gpu_only()) return;
  with_plugin(fiber_plugin(), [](Context& context) {
    constexpr std::int64_t kTogether = 4;  // resident blocks on fibers
    const auto scratch = [&](bool layer, std::int64_t rows, std::int64_t width) {
      return backward(context, Inputs({layer, DType::BF16, rows, width}), false).scratch;
    };
    CHECK(scratch(true, 100, 768) == kTogether * 2 * 768 * 4);
    CHECK(scratch(false, 100, 768) == kTogether * 768 * 4);
    const Inputs in({true, DType::BF16, 100, 768});
    CHECK(backward(context, in, true, false, true).scratch == kTogether * 3 * 768 * 4);
    CHECK(scratch(true, 9, 768) == 2 * 2 * 768 * 4);                  // 8 rows per block
    CHECK(scratch(true, 9, 16384) == kTogether / 2 * 2 * 16384 * 4);  // twice as many threads
    CHECK(scratch(true, 9, 257) == 0);  // two passes, few rows: one block per column
  });
}

TEST_CASE("a device with little shared memory computes a norm's gradients in two passes") {
  if (gpu_only()) return;
  const Inputs in({true, DType::BF16, 19, 1600});
  REQUIRE(::setenv("TESSERA_FIBER_SHARED", "49152", 1) == 0);
  with_plugin(fiber_plugin(), [&](Context& context) {
    check_backward(context, in, Expected(in));
    CHECK(backward(context, in, true).scratch == 0);
  });
  REQUIRE(::unsetenv("TESSERA_FIBER_SHARED") == 0);
}

}  // namespace
}  // namespace tessera::test
