#include "kernels/softmax.h"

#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

TEST_CASE("softmax_forward and softmax_backward match their definitions") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const std::int64_t width : kOddLengths) {
      for (const bool log : {false, true}) {
        const std::int64_t rows = width > 1000 ? 1 : 3, n = rows * width;
        CAPTURE(width);
        CAPTURE(log);
        const Buffer x(dtype, {rows, width}, Buffer::normal(n, 1, 3.0)), y(dtype, {rows, width});
        kernels::softmax_forward(context, {x.view(), y.view(), log});
        const std::vector<double> in = x.values();
        const auto steps = static_cast<std::size_t>(width);
        std::vector<double> want(in.size());
        for (std::size_t r = 0; r < in.size(); r += steps) {
          double highest = in[r], sum = 0;
          for (std::size_t i = r; i < r + steps; ++i) highest = std::max(highest, in[i]);
          for (std::size_t i = r; i < r + steps; ++i) sum += std::exp(in[i] - highest);
          for (std::size_t i = r; i < r + steps; ++i)
            want[i] = log ? in[i] - highest - std::log(sum) : std::exp(in[i] - highest) / sum;
        }
        check_close(y.values(), want, 8 * tolerance(dtype), log ? 1.0 : 0.0);

        const Buffer grad_y(dtype, {rows, width}, Buffer::normal(n, 2));
        const std::vector<double> kept = y.values(), grad = grad_y.values();
        for (const bool accumulate : {false, true}) {
          const Buffer grad_x(dtype, {rows, width}, 1.0);
          kernels::softmax_backward(context,
                                    {y.view(), grad_y.view(), grad_x.gradient(accumulate), log});
          double magnitude = 1.0;
          for (std::size_t r = 0; r < in.size(); r += steps) {
            double sum = 0;
            for (std::size_t i = r; i < r + steps; ++i) sum += log ? grad[i] : grad[i] * kept[i];
            for (std::size_t i = r; i < r + steps; ++i) {
              want[i] = log ? grad[i] - std::exp(kept[i]) * sum : kept[i] * (grad[i] - sum);
              if (accumulate) want[i] += 1.0;
            }
            magnitude = std::max(magnitude, std::abs(sum));
          }
          check_close(grad_x.values(), want, 8 * tolerance(dtype), magnitude);
        }
      }
    }
  });
}

TEST_CASE("softmax of infinite logits") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    const Buffer x(dtype, {3, 3},
                   {-INFINITY, 0, 0, INFINITY, 0, 0, -INFINITY, -INFINITY, -INFINITY});
    const Buffer y(dtype, {3, 3});
    kernels::softmax_forward(context, {x.view(), y.view()});
    const auto values = y.values();
    CHECK(values[0] == 0.0);
    CHECK(values[1] == 0.5);
    CHECK(std::isnan(values[3]));
    CHECK(std::isnan(values[6]));
    kernels::softmax_forward(context, {x.view(), y.view(), true});
    CHECK(y.values()[0] == -INFINITY);
  });
}

TEST_CASE("softmax is bit-identical for any number of threads") {
  const Buffer x(DType::F32, {301, 257}, Buffer::normal(301 * 257, 1));
  check_same_for_any_threads([&](Context& context) {
    const Buffer y(DType::F32, {301, 257});
    kernels::softmax_forward(context, {x.view(), y.view()});
    kernels::softmax_backward(context, {y.view(), x.view(), y.gradient(false)});
    return y.bytes();
  });
}

}  // namespace
}  // namespace tessera::test
