#include "kernels/experts.h"

#include <numeric>

#include "core/base/device_backend.h"
#include "kernels/grouped_matmul.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using Integers = std::vector<std::int32_t>;

Integers integers_of(const IndexBuffer& buffer) {
  Integers values(static_cast<std::size_t>(buffer.view().numel()));
  if (const auto& context = buffer_context())
    context->backend().copy_to_host(values.data(), buffer.view().data, buffer.view().bytes());
  else
    std::memcpy(values.data(), buffer.view().data, buffer.view().bytes());
  return values;
}

IndexBuffer blank(std::int64_t count) {
  return IndexBuffer({count}, Integers(static_cast<std::size_t>(count), -1));
}

TEST_CASE("top_k: the largest elements in descending order, equal ones by column, NaN first") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const std::int64_t width : {1, 5, 8, 33, 256}) {
      for (const std::int64_t k : {1, 2, 3, 8}) {
        if (k > width) continue;
        constexpr std::int64_t kRows = 7;
        std::vector<double> values = Buffer::normal(kRows * width, 1);
        for (double& value : values) value = std::round(2 * value);  // many are equal
        values[static_cast<std::size_t>(width - 1)] = std::nan("");
        const Buffer x(dtype, {kRows, width}, values);
        const IndexBuffer index = blank(kRows * k);
        TensorView place = dense_view(index.view().data, DType::I32, {kRows, k}, context.device());
        kernels::top_k(context, {x.view(), place});
        Integers want;
        for (std::int64_t row = 0; row < kRows; ++row) {
          Integers order(static_cast<std::size_t>(width));
          std::iota(order.begin(), order.end(), 0);
          const double* const from = values.data() + row * width;
          std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
            return from[a] > from[b] || (std::isnan(from[a]) && !std::isnan(from[b]));
          });
          want.insert(want.end(), order.begin(), order.begin() + k);
        }
        CHECK(integers_of(index) == want);
      }
    }
  });
}

// Pairs grouped by expert, as a stable sort gives them.
struct Groups {
  Integers experts, order, place, offsets;
  Groups(std::int64_t pairs, std::int32_t groups, std::int32_t used) {
    const RngKey key = RngKey::make(4, RngPurpose::Test, 0);
    for (std::int64_t i = 0; i < pairs; ++i)
      experts.push_back(static_cast<std::int32_t>(key.word(static_cast<std::uint64_t>(i)) %
                                                  static_cast<std::uint32_t>(used)));
    order.resize(experts.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [this](std::int32_t a, std::int32_t b) {
      return experts[static_cast<std::size_t>(a)] < experts[static_cast<std::size_t>(b)];
    });
    place.resize(experts.size());
    for (std::size_t row = 0; row < order.size(); ++row)
      place[static_cast<std::size_t>(order[row])] = static_cast<std::int32_t>(row);
    for (std::int32_t e = 0; e <= groups; ++e)
      offsets.push_back(
          static_cast<std::int32_t>(std::ranges::count_if(experts, [e](auto x) { return x < e; })));
  }
};

TEST_CASE("group_pairs is a stable sort") {
  for_each_context([](Context& context) {
    for (const std::int64_t pairs : {1, 31, 257, 1000}) {
      for (const std::int32_t groups : {1, 5, 256}) {
        const Groups want(pairs, groups, std::max(1, groups - 1));
        const IndexBuffer experts({pairs}, want.experts);
        const IndexBuffer order = blank(pairs), place = blank(pairs), offsets = blank(groups + 1);
        const Buffer counts(DType::F32, {groups});
        kernels::group_pairs(
            context, {experts.view(), order.view(), place.view(), offsets.view(), counts.view()});
        CHECK(integers_of(order) == want.order);
        CHECK(integers_of(place) == want.place);
        CHECK(integers_of(offsets) == want.offsets);
        for (std::size_t e = 0; e < counts.values().size(); ++e)
          CHECK(counts.values()[e] == want.offsets[e + 1] - want.offsets[e]);
      }
    }
  });
}

TEST_CASE("spread_rows, collect_rows and row_products follow the grouping") {
  for_each_context_and_dtype([](Context& context, DType dtype) {
    constexpr std::int64_t kTokens = 11, kEach = 3, kPairs = kTokens * kEach;
    const Groups groups(kPairs, 6, 5);
    const IndexBuffer order({kPairs}, groups.order), place({kPairs}, groups.place);
    const Buffer weights(accumulator_dtype(dtype), {kPairs}, Buffer::normal(kPairs, 3));
    const auto w = weights.values();
    for (const std::int64_t width : {1, 31, 64, 257}) {
      for (const bool weighted : {false, true}) {
        for (const bool accumulate : {false, true}) {
          const Buffer x(dtype, {kTokens, width}, Buffer::normal(kTokens * width, 1));
          const Buffer rows(dtype, {kPairs, width}, Buffer::normal(kPairs * width, 2));
          const Buffer spread(dtype, {kPairs, width}, 2.0), collected(dtype, {kTokens, width}, 2.0);
          const Buffer products(accumulator_dtype(dtype), {kPairs}, 2.0);
          const TensorView factors = weighted ? weights.view() : TensorView{};
          kernels::spread_rows(context,
                               {x.view(), order.view(), factors, spread.gradient(accumulate)});
          kernels::collect_rows(
              context, {rows.view(), place.view(), factors, collected.gradient(accumulate)});
          kernels::row_products(
              context, {x.view(), rows.view(), place.view(), products.gradient(accumulate)});
          const double start = accumulate ? 2.0 : 0.0;
          std::vector<double> want_spread(static_cast<std::size_t>(kPairs * width)),
              want_collected(static_cast<std::size_t>(kTokens * width), start),
              want_products(static_cast<std::size_t>(kPairs), start);
          const auto from = x.values(), from_rows = rows.values();
          for (std::int64_t pair = 0; pair < kPairs; ++pair) {
            const auto p = static_cast<std::size_t>(pair);
            const double weight = weighted ? w[p] : 1.0;
            for (std::int64_t c = 0; c < width; ++c) {
              const auto token = static_cast<std::size_t>(pair / kEach * width + c);
              const auto row = static_cast<std::size_t>(groups.place[p] * width + c);
              want_spread[row] = start + weight * from[token];
              want_collected[token] += weight * from_rows[row];
              want_products[p] += from[token] * from_rows[row];
            }
          }
          check_close(spread.values(), want_spread, tolerance(dtype), 2.0);
          check_close(collected.values(), want_collected, tolerance(dtype), 8.0);
          check_close(products.values(), want_products, tolerance(accumulator_dtype(dtype)), 40.0);
        }
      }
    }
  });
}

TEST_CASE("grouped products are those of each group's rows, with empty groups and part of them") {
  struct Size {
    std::int64_t rows, in, out;
    std::int32_t groups, used;
  };
  for_each_context_and_dtype([](Context& context, DType dtype) {
    for (const Size& s : {Size{1, 1, 1, 1, 1}, Size{40, 33, 31, 5, 4}, Size{150, 3, 70, 2, 2},
                          Size{66, 64, 65, 8, 3}, Size{20, 131, 99, 5, 2}}) {
      CAPTURE(s.rows);
      const Groups groups(s.rows, s.groups, s.used);
      const IndexBuffer offsets({s.groups + 1}, groups.offsets);
      const Buffer a(dtype, {s.rows, s.in}, Buffer::normal(s.rows * s.in, 1));
      const Buffer g(dtype, {s.rows, s.out}, Buffer::normal(s.rows * s.out, 2));
      const auto av = a.values(), gv = g.values();
      for (const std::int64_t first : {0, s.groups > 1 ? 1 : 0}) {
        const std::int64_t count = s.groups - first;
        for (const bool transposed : {false, true}) {
          for (const bool accumulate : {false, true}) {
            std::vector<std::unique_ptr<Buffer>> weights, gradients;
            std::vector<TensorView> views;
            std::vector<GradientView> places;
            const Shape shape = transposed ? Shape{s.out, s.in} : Shape{s.in, s.out};
            for (std::int64_t i = 0; i < count; ++i) {
              weights.push_back(std::make_unique<Buffer>(
                  dtype, shape, Buffer::normal(s.in * s.out, 5 + static_cast<std::uint64_t>(i))));
              gradients.push_back(
                  std::make_unique<Buffer>(accumulator_dtype(dtype), Shape{s.in, s.out}, 2.0));
              views.push_back(weights.back()->view());
              places.push_back(gradients.back()->gradient(accumulate));
            }
            const Buffer y(dtype, {s.rows, s.out}, 2.0);
            kernels::grouped_matmul(context, {a.view(), offsets.view(), views.data(), first, count,
                                              y.gradient(accumulate), transposed});
            kernels::grouped_gradient(
                context, {a.view(), g.view(), offsets.view(), places.data(), first, count});
            std::vector<double> want(static_cast<std::size_t>(s.rows * s.out), 2.0);
            for (std::int64_t i = 0; i < count; ++i) {
              const auto w = weights[static_cast<std::size_t>(i)]->values();
              std::vector<double> want_gradient(static_cast<std::size_t>(s.in * s.out),
                                                accumulate ? 2.0 : 0.0);
              const auto group = static_cast<std::size_t>(first + i);
              for (std::int64_t r = groups.offsets[group]; r < groups.offsets[group + 1]; ++r) {
                for (std::int64_t j = 0; j < s.out; ++j) {
                  double sum = accumulate ? 2.0 : 0.0;
                  for (std::int64_t k = 0; k < s.in; ++k) {
                    const double left = av[static_cast<std::size_t>(r * s.in + k)];
                    sum += left *
                           w[static_cast<std::size_t>(transposed ? j * s.in + k : k * s.out + j)];
                    want_gradient[static_cast<std::size_t>(k * s.out + j)] +=
                        left * gv[static_cast<std::size_t>(r * s.out + j)];
                  }
                  want[static_cast<std::size_t>(r * s.out + j)] = sum;
                }
              }
              check_close(gradients[static_cast<std::size_t>(i)]->values(), want_gradient,
                          tolerance(accumulator_dtype(dtype)), 40.0);
            }
            check_close(y.values(), want, tolerance(dtype), 20.0);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace tessera::test
