#include "kernels/gather.h"

#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

struct Case {
  Shape x, index;
  int dim;
};

const Case kCases[] = {
    {{5}, {9}, 0},
    {{3, 33}, {3, 2}, 1},
    {{7, 33}, {70, 33}, 0},
    {{7, 33}, {2, 30}, 0},
    {{2, 5, 3}, {2, 4, 3}, 1},
    {{2, 5, 3}, {1, 9, 2}, 1},
    {{257, 1}, {300, 1}, 0},
    {{4, 3, 2, 2}, {4, 3, 2, 5}, 3},
};

std::vector<std::int32_t> indices_of(const Case& c) {
  std::vector<std::int32_t> index(static_cast<std::size_t>(numel(c.index)));
  const RngKey key = RngKey::make(3, RngPurpose::Test, 0);
  for (std::size_t i = 0; i < index.size(); ++i)
    index[i] = static_cast<std::int32_t>(key.word(i) % static_cast<std::uint32_t>(c.x[c.dim]));
  return index;
}

// Place in x of element i of the gathered tensor.
std::size_t source(const Case& c, std::int64_t i, std::int64_t index) {
  std::int64_t at = 0, step = 1;
  for (int d = c.x.size() - 1; d >= 0; --d) {
    at += (d == c.dim ? index : i % c.index[d]) * step;
    step *= c.x[d];
    i /= c.index[d];
  }
  return static_cast<std::size_t>(at);
}

TEST_CASE("gather and scatter_add follow the index along any dim") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const Case& c : kCases) {
      CAPTURE(c.x.str());
      CAPTURE(c.index.str());
      const Buffer x(dtype, c.x, Buffer::normal(numel(c.x), 1)), y(dtype, c.index);
      const std::vector<std::int32_t> places = indices_of(c);
      const IndexBuffer index(c.index, places);
      kernels::gather(context, {x.view(), index.view(), y.view(), c.dim});
      const auto in = x.values(), out = y.values();
      const Buffer sums(accumulator_dtype(dtype), c.x, 1.0);
      std::vector<double> want(in.size(), 1.0);
      for (std::int64_t i = 0; i < numel(c.index); ++i) {
        const std::size_t at = source(c, i, places[static_cast<std::size_t>(i)]);
        CHECK(out[static_cast<std::size_t>(i)] == in[at]);
        want[at] += out[static_cast<std::size_t>(i)];
      }
      kernels::scatter_add(context, {y.view(), index.view(), sums.view(), c.dim});
      check_close(sums.values(), want, tolerance(accumulator_dtype(dtype)), 20.0);
    }
  });
}

TEST_CASE("gather gives NaN for an index out of range, which scatter_add ignores") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    const Buffer x(dtype, {2}, {1, 2}), y(dtype, {3}), sums(accumulator_dtype(dtype), {2});
    const IndexBuffer index({3}, {1, 2, -1});
    kernels::gather(context, {x.view(), index.view(), y.view(), 0});
    CHECK(y.values()[0] == 2.0);
    CHECK(std::isnan(y.values()[1]));
    CHECK(std::isnan(y.values()[2]));
    kernels::scatter_add(context,
                         {x.view().narrow(0, 0, 2), index.view().narrow(0, 1, 2), sums.view(), 0});
    CHECK(sums.values() == std::vector<double>{0, 0});
  });
}

TEST_CASE("scatter_add is bit-identical for any number of threads") {
  const Case c{{7, 513}, {400, 513}, 0};
  const Buffer y(DType::F32, c.index, Buffer::normal(numel(c.index), 1));
  const IndexBuffer index(c.index, indices_of(c));
  check_same_for_any_threads([&](Context& context) {
    const Buffer x(DType::F32, c.x);
    kernels::scatter_add(context, {y.view(), index.view(), x.view(), 0});
    return x.bytes();
  });
}

}  // namespace
}  // namespace tessera::test
