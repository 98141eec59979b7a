#include "kernels/elementwise.h"

#include "kernels/cuda/launch/column_sums.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

TEST_CASE("add sums two tensors, also in place") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const std::int64_t n : kOddLengths) {
        CAPTURE(dtype_name(dtype));
        CAPTURE(n);
        const Buffer a(dtype, {n}, Buffer::normal(n, 1)), b(dtype, {n}, Buffer::normal(n, 2));
        const Buffer y(dtype, {n});
        auto want = a.values();
        const auto addend = b.values();
        for (std::size_t i = 0; i < want.size(); ++i) want[i] += addend[i];
        kernels::add(context, a.view(), b.view(), y.view());
        check_close(y.values(), want, tolerance(dtype));
        kernels::add(context, a.view(), b.view(), a.view());
        CHECK(a.bytes() == y.bytes());
      }
    }
  });
}

TEST_CASE("fill sets every element and nothing else") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const std::int64_t n : kOddLengths) {
        CAPTURE(dtype_name(dtype));
        CAPTURE(n);
        for (const std::size_t before : {1, 8}) {
          CAPTURE(before);
          const std::size_t size = before + static_cast<std::size_t>(n) + 1;
          const Buffer out(dtype, {static_cast<std::int64_t>(size)}, 5.0);
          auto* first = static_cast<char*>(out.view().data) + before * dtype_size(dtype);
          kernels::fill(context, dense_view(first, dtype, {n}, context.device()), -1.25);
          std::vector<double> want(size, -1.25);
          std::fill_n(want.begin(), before, 5.0);
          want.back() = 5.0;
          CHECK(out.values() == want);
        }
      }
    }
  });
}

TEST_CASE("cast converts and scales between all compute dtypes") {
  for_each_context([](Context& context) {
    for (const DType from : kComputingDTypes) {
      for (const DType to : kComputingDTypes) {
        for (const bool accumulate : {false, true}) {
          for (const std::int64_t n : kOddLengths) {
            CAPTURE(dtype_name(from));
            CAPTURE(dtype_name(to));
            CAPTURE(accumulate);
            CAPTURE(n);
            const Buffer in(from, {n}, Buffer::normal(n, 3)), out(to, {n}, 1.0);
            kernels::cast(context, in.view(), out.gradient(accumulate), 0.75);
            auto want = in.values();
            for (double& value : want) value = 0.75 * value + (accumulate ? 1.0 : 0.0);
            // Products are in f32 unless one side is f64.
            const DType computed = from == DType::F64 || to == DType::F64 ? DType::F64 : DType::F32;
            check_close(out.values(), want, std::max(tolerance(to), tolerance(computed)),
                        accumulate ? 1.0 : 0.0);
          }
        }
      }
    }
  });
}

TEST_CASE("an unscaled cast is exact to wider dtypes, and rounds to even") {
  for_each_context([](Context& context) {
    const Buffer half(DType::BF16, {257}, Buffer::normal(257, 4));
    const Buffer single(DType::F32, {257}), again(DType::BF16, {257});
    kernels::cast(context, half.view(), single.gradient(false));
    CHECK(single.values() == half.values());
    kernels::cast(context, single.view(), again.gradient(false));
    CHECK(again.bytes() == half.bytes());
    // bf16 has 8 significant bits: 1 + 2^-8 and 1 + 3 * 2^-8 are ties.
    const Buffer ties(DType::F32, {3}, {1.00390625, 1.01171875, -1.01171875});
    const Buffer rounded(DType::BF16, {3});
    kernels::cast(context, ties.view(), rounded.gradient(false));
    CHECK(rounded.values() == std::vector<double>{1.0, 1.015625, -1.015625});
  });
}

TEST_CASE("cast reads and writes strided rows only") {
  for_each_context([](Context& context) {
    constexpr std::int64_t kRows = 5;
    for (const DType to : {DType::F32, DType::BF16}) {
      for (const std::int64_t columns : {1, 3, 31, 33, 64}) {
        for (const std::int64_t gap : {0, 1, 8}) {
          CAPTURE(dtype_name(to));
          CAPTURE(columns);
          CAPTURE(gap);
          const std::int64_t stride = columns + gap, wide = columns + 2 * gap;
          const Buffer in(DType::F32, {kRows * stride}, Buffer::normal(kRows * stride, 8));
          const Buffer out(to, {kRows * wide}, 5.0);
          const auto rows = [&](TensorView view, std::int64_t step) {
            view.shape = {kRows, columns};
            view.strides = {step, 1};
            return view;
          };
          kernels::cast(context, rows(in.view(), stride), {rows(out.view(), wide), true, true}, 2);
          const auto from = in.values();
          std::vector<double> want(static_cast<std::size_t>(kRows * wide), 5.0);
          for (std::int64_t r = 0; r < kRows; ++r) {
            for (std::int64_t c = 0; c < columns; ++c)
              want[static_cast<std::size_t>(r * wide + c)] +=
                  2 * from[static_cast<std::size_t>(r * stride + c)];
          }
          check_close(out.values(), want, tolerance(to), 5.0);
        }
      }
    }
  });
}

TEST_CASE("sum accumulates in float64") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const std::int64_t n : {0, 1, 3, 31, 33, 257, 16385, 50257}) {
        for (const DType to : {DType::F64, dtype == DType::F64 ? DType::F64 : DType::F32}) {
          CAPTURE(dtype_name(dtype));
          CAPTURE(n);
          const Buffer in(dtype, {n}, Buffer::normal(n, 9, 1.0, 1.0)), out(to, {1}, 2.0);
          double want = 2.0;
          for (const double value : in.values()) want += 0.5 * value;
          kernels::sum(context, in.view(), out.gradient(true), 0.5);
          check_close(out.values(), {want}, to == DType::F64 ? 1e-13 : tolerance(to));
          kernels::sum(context, in.view(), out.gradient(false), 0.5);
          check_close(out.values(), {want - 2.0}, to == DType::F64 ? 1e-12 : 1e-5);
        }
      }
    }
  });
}

TEST_CASE("sum_rows sums columns of strided rows") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const bool accumulate : {false, true}) {
        for (const std::int64_t columns : {1, 3, 31, 33, 257, 8, 520, 50257}) {
          for (const std::int64_t rows : {0, 1, 9, 65, 133}) {
            if (columns > 50000 && rows != 9) continue;
            // Strides that are multiples of a vector, and others; the last row has no padding
            // behind it.
            for (const std::int64_t stride : {(columns + 8) / 8 * 8, columns + 2}) {
              CAPTURE(dtype_name(dtype));
              CAPTURE(accumulate);
              CAPTURE(columns);
              CAPTURE(rows);
              CAPTURE(stride);
              const std::int64_t size = rows == 0 ? 0 : (rows - 1) * stride + columns;
              const Buffer in(dtype, {size}, Buffer::normal(size, 5));
              const DType sum_dtype = dtype == DType::F64 ? DType::F64 : DType::F32;
              const Buffer out(sum_dtype, {columns}, 3.0);
              TensorView window = in.view();
              window.shape = {rows, columns};
              window.strides = {stride, 1};
              kernels::sum_rows(context, window, out.gradient(accumulate));
              std::vector<double> want(static_cast<std::size_t>(columns), accumulate ? 3.0 : 0.0);
              const auto values = in.values();
              for (std::int64_t i = 0; i < size; ++i) {
                if (i % stride < columns)
                  want[static_cast<std::size_t>(i % stride)] += values[static_cast<std::size_t>(i)];
              }
              check_close(out.values(), want, tolerance(sum_dtype), 10.0);
            }
          }
        }
      }
    }
  });
}

TEST_CASE("sum_rows is bit-identical for any number of threads") {
  const Buffer in(DType::F32, {301, 257}, Buffer::normal(301 * 257, 6));
  check_same_for_any_threads([&](Context& context) {
    const Buffer out(DType::F32, {257});
    kernels::sum_rows(context, in.view(), out.gradient(false));
    return out.bytes();
  });
}

TEST_CASE("column-sum blocks cover all rows, and none is empty") {
  using Shape = kernels::cuda::ColumnSumsShape;
  for (const std::int64_t rows : {1, 7, 32, 33, 529, 8192, 1000003}) {
    for (const std::int64_t columns : {1, 31, 256, 257, 768, 50257, 300000}) {
      for (const int pack : {1, 2, 4, 8}) {
        CAPTURE(rows);
        CAPTURE(columns);
        CAPTURE(pack);
        const Shape shape(rows, columns, pack);
        CHECK(shape.tiles * 32 * pack >= columns);
        CHECK((shape.tiles - 1) * 32 * pack < columns);
        CHECK(shape.row_blocks * shape.rows_per_block >= rows);
        CHECK((shape.row_blocks - 1) * shape.rows_per_block < rows);
        CHECK((shape.row_blocks == 1 || shape.tiles * shape.row_blocks <= Shape::kBlocks));
      }
    }
  }
  CHECK(Shape(0, 768, 8).row_blocks == 1);
  CHECK(Shape(8192, 0, 8).tiles == 0);
  const Shape gpt2(8192, 768, 8);
  CHECK(gpt2.tiles * gpt2.row_blocks >= 400);
}

TEST_CASE("elementwise kernels refuse mismatched operands") {
  const auto context = Context::create();
  const Buffer a(DType::F32, {2, 3}), b(DType::F32, {6}), half(DType::BF16, {2, 3});
  CHECK_THROWS_WITH_AS(kernels::cast(*context, a.view(), b.gradient(false)),
                       "cast: out must have shape [2, 3], got [6]", InvalidArgument);
  CHECK_THROWS_WITH_AS(kernels::sum_rows(*context, half.view(), half.gradient(false)),
                       "sum_rows: out must have dtype f32, got bf16", InvalidArgument);
  CHECK_THROWS_WITH_AS(kernels::sum_rows(*context, b.view(), b.gradient(false)),
                       "sum_rows: in must have 2 dims, got shape [6]", InvalidArgument);
  TensorView transposed = a.view();
  transposed.strides = {1, 2};
  CHECK_THROWS_WITH_AS(kernels::sum_rows(*context, transposed, b.gradient(false)),
                       "sum_rows: the last dim of in must be contiguous, got strides [1, 2]",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(kernels::cast(*context, transposed, a.gradient(false)),
                       "cast: in must be contiguous, or [R, C] with strided rows, got shape [2, 3] "
                       "with strides [1, 2]",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(kernels::sum(*context, a.view(), b.gradient(false)),
                       "sum: out must have one element, got shape [6]", InvalidArgument);
  CHECK_THROWS_WITH_AS(kernels::sum(*context, a.view(), half.gradient(false)),
                       "sum: out must have dtype f32, got bf16", InvalidArgument);
  std::int32_t number = 0;
  CHECK_THROWS_WITH_AS(kernels::fill(*context, dense_view(&number, DType::I32, {1}), 1.0),
                       "fill: out must have dtype f32, bf16 or f64, got i32", Unsupported);
}

}  // namespace
}  // namespace tessera::test
