#include "kernels/selection.h"

#include "core/base/device_backend.h"
#include "kernels/strided.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using kernels::CompareKind;

std::vector<std::int32_t> integers_in(Context& context, const TensorView& view) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(view.numel()));
  if (context.device().type == DeviceType::CUDA)
    context.backend().copy_to_host(values.data(), view.data, view.bytes());
  else
    std::memcpy(values.data(), view.data, view.bytes());
  return values;
}

TEST_CASE("where chooses between tensors and numbers, and accumulates") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const std::int64_t n : kOddLengths) {
      CAPTURE(n);
      std::vector<std::int32_t> choice;
      for (std::int64_t i = 0; i < n; ++i) choice.push_back(static_cast<std::int32_t>(i % 3) - 1);
      const IndexBuffer condition({n}, choice);
      const Buffer a(dtype, {n}, Buffer::normal(n, 1)), b(dtype, {n}, Buffer::normal(n, 2));
      const auto left = a.values(), right = b.values();
      for (const int numbers : {0, 1, 2, 3}) {  // bits: a, b are numbers
        for (const bool accumulate : {false, true}) {
          CAPTURE(numbers);
          CAPTURE(accumulate);
          const Buffer y(dtype, {n}, 1.0);
          kernels::where(
              context, {condition.view(), numbers & 1 ? TensorView{} : a.view(),
                        numbers & 2 ? TensorView{} : b.view(), y.gradient(accumulate), 0.5, -2.0});
          std::vector<double> want;
          for (std::size_t i = 0; i < left.size(); ++i) {
            const double chosen =
                choice[i] != 0 ? (numbers & 1 ? 0.5 : left[i]) : (numbers & 2 ? -2.0 : right[i]);
            want.push_back(chosen + (accumulate ? 1.0 : 0.0));
          }
          check_close(y.values(), want, tolerance(dtype), 2.0);
        }
      }
    }
    // Broadcast: a row of conditions, a column of values.
    const IndexBuffer condition({3}, {1, 0, 1});
    const Buffer a(dtype, {2, 1}, {1, 2}), y(dtype, {2, 3});
    kernels::where(context, {kernels::broadcast(condition.view(), {2, 3}),
                             kernels::broadcast(a.view(), {2, 3}),
                             {},
                             y.gradient(false),
                             0,
                             9.0});
    CHECK(y.values() == std::vector<double>{1, 9, 1, 2, 9, 2});
  });
}

TEST_CASE("where and compare work on integers") {
  for_each_context([](Context& context) {
    const IndexBuffer a({3}, {16777217, -5, 7}), b({3}, {16777216, -5, 8}), y({3}, {9, 9, 9});
    kernels::compare(context, {a.view(), b.view(), y.view(), CompareKind::Equal});
    CHECK(integers_in(context, y.view()) == std::vector<std::int32_t>{0, 1, 0});
    kernels::compare(context, {a.view(), {}, y.view(), CompareKind::Less, 7.0, true});
    CHECK(integers_in(context, y.view()) == std::vector<std::int32_t>{1, 0, 0});
    kernels::where(context, {y.view(), a.view(), {}, {y.view(), false, true}, 0.0, -1.0});
    CHECK(integers_in(context, y.view()) == std::vector<std::int32_t>{16777217, -1, -1});
  });
}

TEST_CASE("compare gives 0 or 1 for every relation, also for NaN") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    const Buffer a(dtype, {4}, {1, 2, 3, NAN}), b(dtype, {}, 2.0);
    const auto result = [&](CompareKind kind, bool number, bool swapped) {
      const IndexBuffer y({4}, {9, 9, 9, 9});
      kernels::compare(
          context, {a.view(), number ? TensorView{} : kernels::broadcast(b.view(), {4}), y.view(),
                    kind, 2.0, swapped});
      return integers_in(context, y.view());
    };
    using Integers = std::vector<std::int32_t>;
    for (const bool number : {false, true}) {
      CHECK(result(CompareKind::Equal, number, false) == Integers{0, 1, 0, 0});
      CHECK(result(CompareKind::NotEqual, number, false) == Integers{1, 0, 1, 1});
      CHECK(result(CompareKind::Less, number, false) == Integers{1, 0, 0, 0});
      CHECK(result(CompareKind::LessEqual, number, false) == Integers{1, 1, 0, 0});
      CHECK(result(CompareKind::Less, number, true) == Integers{0, 0, 1, 0});
      CHECK(result(CompareKind::LessEqual, number, true) == Integers{0, 1, 1, 0});
    }
  });
}

}  // namespace
}  // namespace tessera::test
