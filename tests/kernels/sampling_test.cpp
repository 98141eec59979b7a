#include "kernels/sampling.h"

#include <limits>
#include <numeric>

#include "core/base/device_backend.h"
#include "kernels/sampling_weight.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

constexpr RngKey kKey = RngKey::make(3, RngPurpose::Test, 0);
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Options {
  double temperature = 1.0;
  std::int64_t top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
};

/// Reference by sorting, as the header defines; the kernels select.
std::int32_t reference(const std::vector<double>& logits, const Options& options,
                       std::uint32_t word) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  const double largest = logits[order[0]];
  if (options.temperature == 0.0) return static_cast<std::int32_t>(order[0]);

  if (options.top_k > 0)
    order.resize(std::min(order.size(), static_cast<std::size_t>(options.top_k)));
  const double scale = kernels::octaves_per_logit(options.temperature);
  const auto weight = [&](std::size_t id) {
    return kernels::sampling_weight(static_cast<float>(logits[id]), static_cast<float>(largest),
                                    scale);
  };
  const auto sum = [&] {
    std::uint64_t total = 0;
    for (const std::size_t id : order) total += weight(id);
    return total;
  };
  if (options.top_p < 1.0) {
    const std::uint64_t needed = kernels::fraction_of_weights(sum(), options.top_p);
    std::uint64_t reached = 0;
    std::size_t count = 0;
    while (reached < needed) reached += weight(order[count++]);
    order.resize(count);
  }
  std::erase_if(order, [&](std::size_t id) {
    return static_cast<double>(weight(id)) < options.min_p * 0x1p40;
  });
  std::uint64_t target = kernels::draw_below(sum(), word);
  std::sort(order.begin(), order.end());
  for (const std::size_t id : order) {
    if (weight(id) > target) return static_cast<std::int32_t>(id);
    target -= weight(id);
  }
  return -2;
}

std::vector<std::int32_t> tokens_of(Context& context, const IndexBuffer& tokens) {
  std::vector<std::int32_t> result(static_cast<std::size_t>(tokens.view().numel()));
  if (context.device().type == DeviceType::CPU)
    std::memcpy(result.data(), tokens.view().data, tokens.view().bytes());
  else
    context.backend().copy_to_host(result.data(), tokens.view().data, tokens.view().bytes());
  return result;
}

/// Draws for rows `gap` floats apart; row r uses word first_draw + r.
std::vector<std::int32_t> draw(Context& context, std::int64_t rows, std::int64_t columns,
                               const std::vector<double>& logits, const Options& options,
                               std::uint64_t first_draw, std::int64_t gap = 0) {
  std::vector<double> padded(static_cast<std::size_t>(rows * (columns + gap)), 1e30);
  for (std::int64_t row = 0; row < rows; ++row)
    std::copy_n(logits.begin() + row * columns, columns, padded.begin() + row * (columns + gap));
  const Buffer in(DType::F32, {rows, columns + gap}, padded);
  TensorView view = in.view();
  view.shape[1] = columns;
  const IndexBuffer tokens({rows}, std::vector<std::int32_t>(static_cast<std::size_t>(rows), -7));
  kernels::sample(context, {view, tokens.view(), options.temperature, options.top_k, options.top_p,
                            options.min_p, kKey, first_draw});
  return tokens_of(context, tokens);
}

std::vector<double> rounded(std::vector<double> values) {
  for (double& value : values) value = static_cast<double>(static_cast<float>(value));
  return values;
}

/// Typical, masked and degenerate rows.
std::vector<double> rows_of_all_kinds(std::int64_t columns) {
  const auto normal = rounded(Buffer::normal(columns, 5, 3.0));
  std::vector<double> result = normal;
  for (const double value : normal)
    result.push_back(std::round(value));  // ties; zeros of both signs
  for (std::int64_t i = 0; i < columns; ++i) result.push_back(-2.5);
  for (std::size_t i = 0; i < normal.size(); ++i)  // mostly masked
    result.push_back(i % 7 == 3 || i == 0 ? normal[i] : -kInfinity);
  for (const double value : normal)
    result.push_back(static_cast<double>(static_cast<float>(1e6 * value)));
  return result;
}
constexpr std::int64_t kKinds = 5;

TEST_CASE("sampling draws the same tokens as sorting, on every device") {
  for_each_context([](Context& context) {
    for (const std::int64_t columns : kOddSizes) {
      const auto logits = rows_of_all_kinds(columns);
      std::uint64_t first_draw = 0;
      for (const double temperature : {0.0, 0.3, 40.0}) {
        for (const std::int64_t top_k :
             {std::int64_t{0}, std::int64_t{1}, columns / 2, columns + 9}) {
          for (Options options : {Options{}, {.top_p = 0.6}, {.min_p = 0.3}, {1.0, 0, 0.8, 0.05}}) {
            if (temperature == 0.0 && (options.top_p < 1.0 || options.min_p > 0.0)) continue;
            options.temperature = temperature;
            options.top_k = top_k;
            CAPTURE(columns);
            CAPTURE(temperature);
            CAPTURE(top_k);
            CAPTURE(options.top_p);
            CAPTURE(options.min_p);
            const auto tokens = draw(context, kKinds, columns, logits, options, first_draw, 3);
            for (std::int64_t row = 0; row < kKinds; ++row) {
              CAPTURE(row);
              const auto first = logits.begin() + row * columns;
              CHECK(tokens[static_cast<std::size_t>(row)] ==
                    reference({first, first + columns}, options,
                              kKey.word(first_draw + static_cast<std::uint64_t>(row))));
            }
            first_draw += kKinds;
          }
        }
      }
    }
  });
}

TEST_CASE("sampling draws the same tokens as sorting, from a large vocabulary") {
  for_each_context([](Context& context) {
    const std::int64_t columns = 50257;
    const auto logits = rounded(Buffer::normal(columns, 6, 2.0));
    for (const Options options :
         {Options{}, Options{0.8, 40, 0.95}, Options{1.0, 0, 0.9}, Options{0.8, 40, 1.0, 0.1}}) {
      const auto tokens = draw(context, 1, columns, logits, options, 17);
      CHECK(tokens[0] == reference(logits, options, kKey.word(17)));
    }
  });
}

TEST_CASE("weights match the exponential") {
  for (const double temperature : {0.1, 1.0, 7.0}) {
    const double scale = kernels::octaves_per_logit(temperature);
    for (int i = 0; i < 20000; ++i) {
      const auto logit = static_cast<float>(-0.0013 * temperature * i);
      const double exact = std::exp((static_cast<double>(logit) - 2.0) / temperature) * 0x1p40;
      const auto weight = static_cast<double>(kernels::sampling_weight(logit, 2.0F, scale));
      // Errors of the exponential, of rounding down, and of the f64 distance.
      if (!(std::abs(weight - exact) <= 1e-9 * exact + 1.0)) FAIL(logit);
    }
  }
  const double scale = kernels::octaves_per_logit(1.0);
  CHECK(kernels::sampling_weight(3.0F, 3.0F, scale) == std::uint64_t{1} << 40);
  CHECK(kernels::sampling_weight(-std::numeric_limits<float>::infinity(), 3.0F, scale) == 0);
  CHECK(kernels::sampling_weight(-3e38F, 3e38F, scale) == 0);
  const double sharp = kernels::octaves_per_logit(1e-320);
  CHECK(kernels::sampling_weight(3.0F, 3.0F, sharp) == std::uint64_t{1} << 40);
  CHECK(kernels::sampling_weight(2.9F, 3.0F, sharp) == 0);
}

TEST_CASE("keys are ordered like logits") {
  const float inf = std::numeric_limits<float>::infinity();
  const float ascending[] = {-inf,   -3e38F, -1.5F,      -1e-40F, 0.0F,
                             1e-40F, 1.0F,   1.0000001F, 3e38F,   inf};
  for (std::size_t i = 1; i < std::size(ascending); ++i)
    CHECK(kernels::logit_key(ascending[i - 1]) < kernels::logit_key(ascending[i]));
  for (const float logit : ascending)
    CHECK(kernels::logit_of_key(kernels::logit_key(logit)) == logit);
  CHECK(kernels::logit_key(-0.0F) == kernels::logit_key(0.0F));
  CHECK(kernels::logit_key(inf) == kernels::kInfinityKey);
  CHECK(kernels::logit_key(-inf) == kernels::kNegativeInfinityKey);
}

TEST_CASE("fractions and draws stay within the total weight") {
  const std::uint64_t large = (std::uint64_t{1} << 62) + 12345;
  for (const std::uint64_t total : {std::uint64_t{1}, std::uint64_t{1} << 40, large}) {
    CHECK(kernels::fraction_of_weights(total, 1e-300) == 1);
    CHECK(kernels::fraction_of_weights(total, 0.9999999999999999) <= total);
    CHECK(kernels::draw_below(total, 0) == 0);
    CHECK(kernels::draw_below(total, 0xffffffffU) < total);
    CHECK(kernels::draw_below(total, 0x80000000U) == total / 2);
  }
  CHECK(kernels::fraction_of_weights(10, 0.25) == 3);
  CHECK(kernels::fraction_of_weights(10, 0.5) == 5);
  CHECK(kernels::least_weight(0.0) == 0);
  CHECK(kernels::least_weight(1e-300) == 1);
  CHECK(kernels::least_weight(1.0) == std::uint64_t{1} << 40);
}

TEST_CASE("a row without a valid logit: the CPU names it, CUDA returns -1") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for_each_context([&](Context& context) {
    const bool cpu = context.device().type == DeviceType::CPU;
    for (const double temperature : {0.0, 1.0}) {
      const auto run = [&](const std::vector<double>& bad) {
        std::vector<double> logits{1.0, 2.0, 3.0};
        logits.insert(logits.end(), bad.begin(), bad.end());
        return draw(context, 2, 3, logits, {temperature, 2, 0.9}, 0);
      };
      if (cpu) {
        CHECK_THROWS_WITH_AS(run({1.0, nan, 2.0}),
                             "sample: a logit of row 1 is NaN: the model's weights are not usable",
                             InvalidArgument);
        CHECK_THROWS_WITH_AS(run({-kInfinity, -kInfinity, -kInfinity}),
                             "sample: the largest logit of row 1 is -inf: the model's weights are "
                             "not usable",
                             InvalidArgument);
        CHECK_THROWS_WITH_AS(run({1.0, kInfinity, 2.0}),
                             "sample: the largest logit of row 1 is inf: the model's weights are "
                             "not usable",
                             InvalidArgument);
      } else {
        for (const auto& bad : {std::vector<double>{1.0, -nan, 2.0},
                                {nan, 1.0, 2.0},
                                {-kInfinity, -kInfinity, -kInfinity},
                                {1.0, kInfinity, 2.0}}) {
          const auto tokens = run(bad);
          CHECK(tokens[0] >= 0);
          CHECK(tokens[1] == -1);
        }
      }
    }
  });
}

}  // namespace
}  // namespace tessera::test
