#include "kernels/norm.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

constexpr double kEps = 1e-5;

struct Reference {
  std::vector<double> y, rstd, grad_x, grad_weight;
};

// Both directions by the book, in long double.
Reference reference(std::int64_t rows, std::int64_t width, const std::vector<double>& x,
                    const std::vector<double>& weight, const std::vector<double>& grad_y) {
  const auto columns = static_cast<std::size_t>(width);
  const auto count = static_cast<long double>(width);
  Reference result;
  result.grad_weight.resize(columns);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    const double* in = x.data() + r * columns;
    const double* grad = grad_y.data() + r * columns;
    long double squares = 0, sum_gx = 0;
    for (std::size_t c = 0; c < columns; ++c) {
      squares += static_cast<long double>(in[c]) * in[c];
      sum_gx += static_cast<long double>(weight[c]) * grad[c] * in[c];
    }
    const long double rstd = 1.0L / std::sqrt(squares / count + static_cast<long double>(kEps));
    result.rstd.push_back(static_cast<double>(rstd));
    for (std::size_t c = 0; c < columns; ++c) {
      result.y.push_back(static_cast<double>(weight[c] * in[c] * rstd));
      result.grad_x.push_back(static_cast<double>(rstd * weight[c] * grad[c] -
                                                  in[c] * rstd * rstd * rstd * sum_gx / count));
      result.grad_weight[c] += static_cast<double>(grad[c] * in[c] * rstd);
    }
  }
  return result;
}

DType sums_of(DType dtype) { return dtype == DType::F64 ? DType::F64 : DType::F32; }

void check_both_directions(Context& context, DType dtype, std::int64_t rows, std::int64_t width,
                           bool accumulate) {
  const DType sums = sums_of(dtype);
  const Buffer x(dtype, {rows, width}, Buffer::normal(rows * width, 1, 2.0, 0.5));
  const Buffer weight(dtype, {width}, Buffer::normal(width, 2));
  const Buffer grad_y(dtype, {rows, width}, Buffer::normal(rows * width, 3));
  auto want = reference(rows, width, x.values(), weight.values(), grad_y.values());

  const Buffer y(dtype, {rows, width}, 77.0), rstd(sums, {rows});
  kernels::rms_norm_forward(context, {x.view(), weight.view(), y.view(), rstd.view(), kEps});
  // Where the sum over the row is not vectorized, its rounding error grows with the row.
  const double long_row = width > 50000 ? 8.0 : width > 4096 ? 4.0 : 1.0;
  check_close(y.values(), want.y, (width > 50000 ? long_row : 1.0) * tolerance(dtype), 1.0);
  check_close(rstd.values(), want.rstd, long_row * tolerance(sums), width == 1 ? 0.0 : 1.0);

  const Buffer grad_x(dtype, {rows, width}, 0.5), grad_weight(sums, {width}, 0.5);
  const Buffer exact_rstd(sums, {rows}, want.rstd);
  kernels::rms_norm_backward(context,
                             {x.view(), weight.view(), exact_rstd.view(), grad_y.view(),
                              grad_x.gradient(accumulate), grad_weight.gradient(accumulate)});
  if (accumulate) {
    for (auto* gradient : {&want.grad_x, &want.grad_weight})
      for (double& value : *gradient) value += 0.5;
  }
  // With few columns the terms of grad_x nearly cancel where rstd is large.
  check_close(grad_x.values(), want.grad_x, tolerance(dtype), width < 4 ? 100.0 : 3.0);
  check_close(grad_weight.values(), want.grad_weight, tolerance(sums), 10.0);
}

TEST_CASE("RMS norm matches float64 in both directions, overwriting or adding") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const bool accumulate : {false, true}) {
        for (const std::int64_t width : kOddSizes) {
          CAPTURE(dtype_name(dtype));
          CAPTURE(accumulate);
          CAPTURE(width);
          check_both_directions(context, dtype, 19, width, accumulate);
        }
      }
    }
  });
}

TEST_CASE("RMS norm takes rows of all lengths that the CUDA kernels tell apart") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      // Of packs kept by a warp, by a block, and read again; of single elements, of both kinds.
      for (const std::int64_t width : {256, 512, 768, 1600, 2304, 4096, 8200, 1030, 50257}) {
        CAPTURE(dtype_name(dtype));
        CAPTURE(width);
        const std::int64_t rows = width < 1000 ? 9 : width < 50000 ? 2 : 1;
        check_both_directions(context, dtype, rows, width, false);
      }
    }
  });
}

TEST_CASE("RMS norm repeats to the bit for any number of threads") {
  const std::int64_t rows = 300, width = 193;
  const Buffer x(DType::F32, {rows, width}, Buffer::normal(rows * width, 12));
  const Buffer weight(DType::F32, {width}, 1.5);
  std::vector<std::vector<char>> first;
  for (const int threads : {1, 2, 3}) {
    const auto context = Context::create({.threads = threads});
    const Buffer y(DType::F32, {rows, width}), rstd(DType::F32, {rows});
    const Buffer grad_x(DType::F32, {rows, width}), grad_weight(DType::F32, {width});
    kernels::rms_norm_forward(*context, {x.view(), weight.view(), y.view(), rstd.view(), kEps});
    kernels::rms_norm_backward(*context, {x.view(), weight.view(), rstd.view(), y.view(),
                                          grad_x.gradient(false), grad_weight.gradient(false)});
    const std::vector<std::vector<char>> bytes = {y.bytes(), grad_x.bytes(), grad_weight.bytes()};
    if (first.empty()) first = bytes;
    CHECK(bytes == first);
  }
}

TEST_CASE("RMS norm writes the gradient of its weight also for no rows, and skips unwanted ones") {
  for_each_context([](Context& context) {
    const Buffer x(DType::F32, {0, 3}), weight(DType::F32, {3}), rows(DType::F32, {0});
    const Buffer grad_weight(DType::F32, {3}, 9.0);
    kernels::rms_norm_forward(context, {x.view(), weight.view(), x.view()});
    kernels::rms_norm_backward(
        context, {x.view(), weight.view(), rows.view(), x.view(), x.gradient(false), {}});
    CHECK(grad_weight.values() == std::vector<double>(3, 9.0));
    kernels::rms_norm_backward(context, {x.view(), weight.view(), rows.view(), x.view(),
                                         x.gradient(false), grad_weight.gradient(false)});
    CHECK(grad_weight.values() == std::vector<double>(3, 0.0));
  });
}

TEST_CASE("RMS norm refuses what does not fit") {
  const auto context = Context::create();
  const Buffer x(DType::F32, {4, 3}), weight(DType::F32, {3}), wide(DType::F32, {4});
  const Buffer empty(DType::F32, {4, 0}), none(DType::F32, {0}), half(DType::BF16, {4});
  CHECK_THROWS_WITH_AS(kernels::rms_norm_forward(*context, {x.view(), wide.view(), x.view()}),
                       "rms_norm_forward: weight must have shape [3], got [4]", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      kernels::rms_norm_forward(*context, {x.view(), weight.view(), x.view(), half.view()}),
      "rms_norm_forward: rstd must have dtype f32, got bf16", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      kernels::rms_norm_forward(*context, {x.view(), weight.view(), x.view(), {}, -1.0}),
      "rms_norm_forward: eps must be positive, got -1", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      kernels::rms_norm_forward(*context, {empty.view(), none.view(), empty.view()}),
      "rms_norm_forward: x has no columns to take a mean over, got shape [4, 0]", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      kernels::rms_norm_backward(*context, {x.view(), weight.view(), wide.view(), x.view(),
                                            x.gradient(false), wide.gradient(false)}),
      "rms_norm_backward: grad_weight must have shape [3], got [4]", InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
