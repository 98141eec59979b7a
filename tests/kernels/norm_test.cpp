#include "kernels/norm.h"

#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

constexpr double kEps = 1e-5;

struct Reference {
  std::vector<double> y, mean, rstd, grad_x, grad_weight, grad_bias;
};

// Both directions by the book, in long double. grad_y may be empty.
Reference reference(std::int64_t rows, std::int64_t width, const std::vector<double>& x,
                    const std::vector<double>& weight, const std::vector<double>& bias,
                    const std::vector<double>& grad_y) {
  const auto columns = static_cast<std::size_t>(width);
  Reference result;
  result.grad_weight.resize(columns);
  result.grad_bias.resize(columns);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    const double* in = x.data() + r * columns;
    long double mean = 0, variance = 0;
    for (std::size_t c = 0; c < columns; ++c) mean += static_cast<long double>(in[c]);
    mean /= static_cast<long double>(width);
    for (std::size_t c = 0; c < columns; ++c) variance += (in[c] - mean) * (in[c] - mean);
    const long double rstd = 1.0L / std::sqrt(variance / static_cast<long double>(width) +
                                              static_cast<long double>(kEps));
    result.mean.push_back(static_cast<double>(mean));
    result.rstd.push_back(static_cast<double>(rstd));
    for (std::size_t c = 0; c < columns; ++c)
      result.y.push_back(static_cast<double>(weight[c] * (in[c] - mean) * rstd + bias[c]));
    if (grad_y.empty()) continue;
    const double* grad = grad_y.data() + r * columns;
    long double sum_g = 0, sum_gn = 0;
    for (std::size_t c = 0; c < columns; ++c) {
      const long double n = (in[c] - mean) * rstd;
      sum_g += static_cast<long double>(weight[c]) * grad[c];
      sum_gn += static_cast<long double>(weight[c]) * grad[c] * n;
      result.grad_weight[c] += static_cast<double>(grad[c] * n);
      result.grad_bias[c] += grad[c];
    }
    for (std::size_t c = 0; c < columns; ++c) {
      const long double n = (in[c] - mean) * rstd;
      const auto count = static_cast<long double>(width);
      result.grad_x.push_back(
          static_cast<double>(rstd * (static_cast<long double>(weight[c]) * grad[c] -
                                      sum_g / count - n * sum_gn / count)));
    }
  }
  return result;
}

double relative_norm_error(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error / norm);
}

DType sums_of(DType dtype) { return dtype == DType::F64 ? DType::F64 : DType::F32; }

TEST_CASE("layer norm forward matches float64") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const std::int64_t width : kOddSizes) {
        for (const double offset : {0.0, 3.0}) {
          CAPTURE(dtype_name(dtype));
          CAPTURE(width);
          CAPTURE(offset);
          const std::int64_t rows = 7;
          const Buffer x(dtype, {rows, width}, Buffer::normal(rows * width, 1, 2.0, offset));
          const Buffer weight(dtype, {width}, Buffer::normal(width, 2));
          const Buffer bias(dtype, {width}, Buffer::normal(width, 3));
          const Buffer y(dtype, {rows, width}, 77.0);
          const Buffer mean(sums_of(dtype), {rows}), rstd(sums_of(dtype), {rows});
          kernels::layer_norm_forward(context, {x.view(), weight.view(), bias.view(), y.view(),
                                                mean.view(), rstd.view(), kEps});
          const auto want = reference(rows, width, x.values(), weight.values(), bias.values(), {});
          check_close(y.values(), want.y, tolerance(dtype), 1.0 + offset);
          check_close(mean.values(), want.mean, tolerance(sums_of(dtype)), 1.0 + offset);
          check_close(rstd.values(), want.rstd, tolerance(sums_of(dtype)), width == 1 ? 0.0 : 1.0);
        }
      }
    }
  });
}

TEST_CASE("layer norm backward matches float64, overwriting or adding") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const bool accumulate : {false, true}) {
        for (const std::int64_t width : {1, 2, 3, 31, 33, 257}) {
          CAPTURE(dtype_name(dtype));
          CAPTURE(accumulate);
          CAPTURE(width);
          const std::int64_t rows = 75;  // one block of rows, a group of eight, and a remainder
          const DType sums = sums_of(dtype);
          const Buffer x(dtype, {rows, width}, Buffer::normal(rows * width, 4, 2.0, 0.5));
          const Buffer weight(dtype, {width}, Buffer::normal(width, 5));
          const Buffer grad_y(dtype, {rows, width}, Buffer::normal(rows * width, 6));
          auto want =
              reference(rows, width, x.values(), weight.values(),
                        std::vector<double>(static_cast<std::size_t>(width)), grad_y.values());
          const Buffer mean(sums, {rows}, want.mean), rstd(sums, {rows}, want.rstd);
          const Buffer grad_x(dtype, {rows, width}, 0.5);
          const Buffer grad_weight(sums, {width}, 0.5), grad_bias(sums, {width}, 0.5);
          kernels::layer_norm_backward(
              context, {x.view(), weight.view(), mean.view(), rstd.view(), grad_y.view(),
                        grad_x.gradient(accumulate), grad_weight.gradient(accumulate),
                        grad_bias.gradient(accumulate)});
          if (accumulate) {
            for (auto* gradient : {&want.grad_x, &want.grad_weight, &want.grad_bias})
              for (double& value : *gradient) value += 0.5;
          }
          // With two or three columns the terms of grad_x nearly cancel where rstd is large; of
          // one column they cancel wholly, and rstd is 1 / sqrt(eps).
          const double magnitude = width == 1 ? 1000.0 : width < 4 ? 30.0 : 3.0;
          check_close(grad_x.values(), want.grad_x, tolerance(dtype), magnitude);
          check_close(grad_weight.values(), want.grad_weight, tolerance(sums), 10.0);
          check_close(grad_bias.values(), want.grad_bias, tolerance(sums), 10.0);
        }
      }
    }
  });
}

TEST_CASE("layer norm in f32 is within 1e-6 of float64 in norm") {
  const std::int64_t rows = 200, width = 96;
  for_each_context([&](Context& context) {
    const Buffer x(DType::F32, {rows, width}, Buffer::normal(rows * width, 7));
    const Buffer weight(DType::F32, {width}, Buffer::normal(width, 8, 0.1, 1.0));
    const Buffer bias(DType::F32, {width}, Buffer::normal(width, 9, 0.1));
    const Buffer grad_y(DType::F32, {rows, width}, Buffer::normal(rows * width, 10));
    const auto want =
        reference(rows, width, x.values(), weight.values(), bias.values(), grad_y.values());
    const Buffer y(DType::F32, {rows, width}), mean(DType::F32, {rows}), rstd(DType::F32, {rows});
    const Buffer grad_x(DType::F32, {rows, width});
    const Buffer grad_weight(DType::F32, {width}), grad_bias(DType::F32, {width});
    kernels::layer_norm_forward(
        context, {x.view(), weight.view(), bias.view(), y.view(), mean.view(), rstd.view(), kEps});
    kernels::layer_norm_backward(
        context, {x.view(), weight.view(), mean.view(), rstd.view(), grad_y.view(),
                  grad_x.gradient(false), grad_weight.gradient(false), grad_bias.gradient(false)});
    CHECK(relative_norm_error(y.values(), want.y) < 1e-6);
    CHECK(relative_norm_error(grad_x.values(), want.grad_x) < 1e-6);
    CHECK(relative_norm_error(grad_weight.values(), want.grad_weight) < 1e-6);
    CHECK(relative_norm_error(grad_bias.values(), want.grad_bias) < 1e-6);
  });
}

// Widths around those at which the CUDA kernels change from warps to blocks, from rows in registers
// to rows read again, and from packs to single elements.
TEST_CASE("layer norm matches float64 for long rows") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const std::int64_t width :
           {8, 248, 264, 768, 1023, 1033, 1600, 2056, 4104, 8200, 50257}) {
        CAPTURE(dtype_name(dtype));
        CAPTURE(width);
        const std::int64_t rows = width < 1000 ? 9 : width < 50000 ? 2 : 1;
        // The rounding error of the sums over a row grows with the row.
        const double long_row = width < 50000 ? 1.0 : 8.0;
        const DType sums = sums_of(dtype);
        const Buffer x(dtype, {rows, width}, Buffer::normal(rows * width, 13, 2.0, 0.5));
        const Buffer weight(dtype, {width}, Buffer::normal(width, 14));
        const Buffer bias(dtype, {width}, Buffer::normal(width, 15));
        const Buffer grad_y(dtype, {rows, width}, Buffer::normal(rows * width, 16));
        const Buffer y(dtype, {rows, width}), grad_x(dtype, {rows, width});
        const Buffer mean(sums, {rows}), rstd(sums, {rows});
        const Buffer grad_weight(sums, {width}), grad_bias(sums, {width});
        kernels::layer_norm_forward(context, {x.view(), weight.view(), bias.view(), y.view(),
                                              mean.view(), rstd.view(), kEps});
        kernels::layer_norm_backward(
            context,
            {x.view(), weight.view(), mean.view(), rstd.view(), grad_y.view(),
             grad_x.gradient(false), grad_weight.gradient(false), grad_bias.gradient(false)});
        const auto want =
            reference(rows, width, x.values(), weight.values(), bias.values(), grad_y.values());
        check_close(y.values(), want.y, long_row * tolerance(dtype), 3.0);
        check_close(mean.values(), want.mean, long_row * tolerance(sums), 1.0);
        check_close(rstd.values(), want.rstd, long_row * tolerance(sums), 1.0);
        check_close(grad_x.values(), want.grad_x, long_row * tolerance(dtype), 3.0);
        check_close(grad_weight.values(), want.grad_weight, long_row * tolerance(sums), 10.0);
        check_close(grad_bias.values(), want.grad_bias, tolerance(sums), 10.0);
      }
    }
  });
}

TEST_CASE("layer norm takes rows that do not begin at a multiple of 16 bytes") {
  for_each_context([](Context& context) {
    const std::int64_t rows = 3, width = 64;
    const Buffer wide(DType::F32, {rows * width + 1}, Buffer::normal(rows * width + 1, 17));
    const Buffer one(DType::F32, {width}, 1.0), zero(DType::F32, {width});
    const Buffer y(DType::F32, {rows, width}), grad_x(DType::F32, {rows, width});
    const Buffer mean(DType::F32, {rows}), rstd(DType::F32, {rows});
    const Buffer grad_weight(DType::F32, {width}), grad_bias(DType::F32, {width});
    const TensorView x =
        dense_view(wide.view().as<float>() + 1, DType::F32, {rows, width}, context.device());
    kernels::layer_norm_forward(
        context, {x, one.view(), zero.view(), y.view(), mean.view(), rstd.view(), kEps});
    kernels::layer_norm_backward(
        context, {x, one.view(), mean.view(), rstd.view(), x, grad_x.gradient(false),
                  grad_weight.gradient(false), grad_bias.gradient(false)});
    const auto values = wide.values();
    const std::vector<double> rest(values.begin() + 1, values.end());
    const auto want = reference(rows, width, rest, one.values(), zero.values(), rest);
    check_close(y.values(), want.y, tolerance(DType::F32), 1.0);
    check_close(grad_x.values(), want.grad_x, tolerance(DType::F32), 3.0);
    check_close(grad_weight.values(), want.grad_weight, tolerance(DType::F32), 10.0);
    check_close(grad_bias.values(), want.grad_bias, tolerance(DType::F32), 10.0);
  });
}

TEST_CASE("layer norm's variance does not cancel far from zero") {
  for_each_context([](Context& context) {
    const std::int64_t width = 64;
    const Buffer x(DType::F32, {1, width}, Buffer::normal(width, 11, 0.1, 1000.0));
    const Buffer one(DType::F32, {width}, 1.0), zero(DType::F32, {width});
    const Buffer y(DType::F32, {1, width}), mean(DType::F32, {1}), rstd(DType::F32, {1});
    kernels::layer_norm_forward(
        context, {x.view(), one.view(), zero.view(), y.view(), mean.view(), rstd.view(), kEps});
    const auto want = reference(1, width, x.values(), one.values(), zero.values(), {});
    check_close(rstd.values(), want.rstd, 1e-5);
  });
}

TEST_CASE("layer norm repeats to the bit for any number of threads") {
  const std::int64_t rows = 300, width = 193;
  const Buffer x(DType::F32, {rows, width}, Buffer::normal(rows * width, 12));
  const Buffer weight(DType::F32, {width}, 1.5), bias(DType::F32, {width}, 0.5);
  std::vector<std::vector<char>> first;
  for (const int threads : {1, 2, 3}) {
    const auto context = Context::create({.threads = threads});
    const Buffer y(DType::F32, {rows, width}), mean(DType::F32, {rows}), rstd(DType::F32, {rows});
    const Buffer grad_x(DType::F32, {rows, width});
    const Buffer grad_weight(DType::F32, {width}), grad_bias(DType::F32, {width});
    kernels::layer_norm_forward(
        *context, {x.view(), weight.view(), bias.view(), y.view(), mean.view(), rstd.view(), kEps});
    kernels::layer_norm_backward(
        *context, {x.view(), weight.view(), mean.view(), rstd.view(), y.view(),
                   grad_x.gradient(false), grad_weight.gradient(false), grad_bias.gradient(false)});
    const std::vector<std::vector<char>> bytes = {y.bytes(), grad_x.bytes(), grad_weight.bytes(),
                                                  grad_bias.bytes()};
    if (first.empty()) first = bytes;
    CHECK(bytes == first);
  }
}

TEST_CASE("layer norm writes gradients of parameters also for no rows, and skips unwanted ones") {
  for_each_context([](Context& context) {
    const Buffer x(DType::F32, {0, 3}), weight(DType::F32, {3}), rows(DType::F32, {0});
    const Buffer grad_weight(DType::F32, {3}, 9.0), grad_bias(DType::F32, {3}, 9.0);
    kernels::layer_norm_forward(context, {x.view(), weight.view(), weight.view(), x.view()});
    kernels::layer_norm_backward(context, {x.view(),
                                           weight.view(),
                                           rows.view(),
                                           rows.view(),
                                           x.view(),
                                           x.gradient(false),
                                           grad_weight.gradient(false),
                                           {}});
    CHECK(grad_weight.values() == std::vector<double>(3, 0.0));
    CHECK(grad_bias.values() == std::vector<double>(3, 9.0));
  });
}

TEST_CASE("layer norm refuses what does not fit") {
  const auto context = Context::create();
  const Buffer x(DType::F32, {4, 3}), weight(DType::F32, {3}), wide(DType::F32, {4});
  const Buffer empty(DType::F32, {4, 0}), none(DType::F32, {0}), half(DType::BF16, {4});
  CHECK_THROWS_WITH_AS(
      kernels::layer_norm_forward(*context, {x.view(), wide.view(), weight.view(), x.view()}),
      "layer_norm_forward: weight must have shape [3], got [4]", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      kernels::layer_norm_forward(*context, {x.view(), weight.view(), weight.view(), x.view(),
                                             half.view(), wide.view(), kEps}),
      "layer_norm_forward: mean must have dtype f32, got bf16", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      kernels::layer_norm_forward(*context, {x.view(), weight.view(), weight.view(), x.view(),
                                             wide.view(), wide.view(), 0.0}),
      "layer_norm_forward: eps must be positive, got 0", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      kernels::layer_norm_forward(*context, {empty.view(), none.view(), none.view(), empty.view()}),
      "layer_norm_forward: x has no columns to take a mean over, got shape [4, 0]",
      InvalidArgument);
  CHECK_THROWS_WITH_AS(
      kernels::layer_norm_backward(
          *context, {x.view(), weight.view(), wide.view(), wide.view(), x.view(), x.gradient(false),
                     wide.gradient(false), weight.gradient(false)}),
      "layer_norm_backward: grad_weight must have shape [3], got [4]", InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
