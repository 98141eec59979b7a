#include "kernels/reduction.h"

#include "core/base/device_backend.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

struct Sums {
  Shape in, out;
};

const Sums kSums[] = {
    {{257}, {1}},
    {{3, 33}, {3, 1}},
    {{33, 31}, {1, 31}},
    {{33, 31}, {1, 1}},
    {{1, 5}, {1, 5}},
    {{2, 3, 5}, {2, 1, 5}},
    {{2, 3, 5}, {1, 3, 1}},
    {{2, 3, 5}, {1, 1, 5}},
    {{2, 130}, {1, 130}},
    {{1300, 2}, {1, 2}},
    {{2, 1300}, {2, 1}},
    {{0, 3}, {1, 3}},
    {{3, 0}, {3, 1}},
    {{0, 3}, {0, 1}},
    {{2, 0, 3}, {1, 1, 3}},
    {{}, {}},
    {{2, 3, 4, 5}, {2, 1, 4, 1}},
    {{2, 3, 4, 5}, {1, 3, 1, 5}},
    {{1025, 70}, {1, 70}},
};

// Place in `out` of element i of `in`.
std::size_t target(const Sums& c, std::int64_t i) {
  std::int64_t at = 0, step = 1;
  for (int d = c.in.size() - 1; d >= 0; --d) {
    if (c.out[d] != 1) at += i % c.in[d] * step;
    step *= c.out[d];
    i /= c.in[d];
  }
  return static_cast<std::size_t>(at);
}

TEST_CASE("sum_to sums over any dims") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const Sums& c : kSums) {
      for (const DType to : {dtype, accumulator_dtype(dtype)}) {
        for (const bool accumulate : {false, true}) {
          CAPTURE(c.in.str());
          CAPTURE(c.out.str());
          CAPTURE(dtype_name(to));
          CAPTURE(accumulate);
          const Buffer in(dtype, c.in, Buffer::normal(numel(c.in), 1)), out(to, c.out, 1.0);
          std::vector<double> want(static_cast<std::size_t>(numel(c.out)), accumulate ? 1.0 : 0.0);
          const auto values = in.values();
          for (std::int64_t i = 0; i < numel(c.in); ++i)
            want[target(c, i)] += 0.5 * values[static_cast<std::size_t>(i)];
          kernels::sum_to(context, {in.view(), out.gradient(accumulate), 0.5});
          check_close(out.values(), want, tolerance(to), 30.0);
        }
      }
    }
  });
}

TEST_CASE("sum_to reads strided views") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    const Buffer in(dtype, {5, 6}, Buffer::normal(30, 1)), out(dtype, {6, 1});
    TensorView transposed = in.view();
    transposed.shape = {6, 5};
    transposed.strides = {1, 6};
    kernels::sum_to(context, {transposed, out.gradient(false)});
    std::vector<double> want(6);
    const auto values = in.values();
    for (std::size_t i = 0; i < 30; ++i) want[i % 6] += values[i];
    check_close(out.values(), want, tolerance(dtype), 5.0);
  });
}

TEST_CASE("sum_to is bit-identical for any number of threads") {
  const Buffer in(DType::F32, {301, 7, 257}, Buffer::normal(301 * 7 * 257, 6));
  for (const Shape& shape :
       {Shape{1, 7, 257}, Shape{301, 1, 257}, Shape{301, 7, 1}, Shape{1, 1, 1}})
    check_same_for_any_threads([&](Context& context) {
      const Buffer out(DType::F32, shape);
      kernels::sum_to(context, {in.view(), out.gradient(false)});
      return out.bytes();
    });
}

TEST_CASE("max_along finds the first of the largest elements, and NaN") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const Shape& shape : {Shape{1, 1, 1}, Shape{3, 33, 1}, Shape{2, 5, 7}, Shape{1, 257, 3}}) {
      CAPTURE(shape.str());
      const std::int64_t outer = shape[0], count = shape[1], inner = shape[2];
      std::vector<double> values = Buffer::normal(numel(shape), 1);
      for (double& value : values) value = std::round(2 * value);  // with ties
      if (count > 2) values[static_cast<std::size_t>(2 * inner)] = NAN;
      const Buffer in(dtype, shape, values), highest(dtype, {outer, inner});
      const IndexBuffer places({outer, inner},
                               std::vector<std::int32_t>(static_cast<std::size_t>(outer * inner)));
      kernels::max_along(context, {in.view(), highest.view(), places.view()});
      kernels::max_along(context, {in.view(), {}, places.view()});
      std::vector<std::int32_t> got(static_cast<std::size_t>(outer * inner));
      if (context.device().type == DeviceType::CUDA)
        context.backend().copy_to_host(got.data(), places.view().data, places.view().bytes());
      else
        std::memcpy(got.data(), places.view().data, places.view().bytes());
      const auto found = highest.values();
      for (std::int64_t i = 0; i < outer * inner; ++i) {
        const auto at = [&](std::int64_t n) {
          return values[static_cast<std::size_t>((i / inner * count + n) * inner + i % inner)];
        };
        std::int64_t best = 0;
        for (std::int64_t n = 1; n < count; ++n)
          if (at(n) > at(best) || (std::isnan(at(n)) && !std::isnan(at(best)))) best = n;
        CHECK(got[static_cast<std::size_t>(i)] == best);
        const double value = found[static_cast<std::size_t>(i)];
        CHECK((value == at(best) || (std::isnan(value) && std::isnan(at(best)))));
      }
    }
  });
}

}  // namespace
}  // namespace tessera::test
