#include "kernels/cross_entropy.h"

#include <limits>

#include "kernels/cuda/launch/cross_entropy.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using kernels::cross_entropy;
using kernels::kIgnoreTarget;

struct Expected {
  std::vector<double> losses, gradient;
};

Expected expected_of(std::vector<double> logits, const std::vector<std::int32_t>& targets,
                     double grad_scale, double softcap) {
  Expected result;
  const std::size_t vocabulary = logits.size() / targets.size();
  std::vector<double> slopes(logits.size(), 1.0);
  for (std::size_t i = 0; softcap > 0 && i < logits.size(); ++i) {
    const double t = std::tanh(logits[i] / softcap);
    logits[i] = softcap * t;
    slopes[i] = 1 - t * t;
  }
  for (std::size_t row = 0; row < targets.size(); ++row) {
    const double* x = logits.data() + row * vocabulary;
    const bool ignored = targets[row] == kIgnoreTarget;
    const double max = *std::max_element(x, x + vocabulary);
    double sum = 0;
    for (std::size_t i = 0; i < vocabulary; ++i) sum += std::exp(x[i] - max);
    result.losses.push_back(
        ignored ? 0.0 : std::log(sum) + max - x[static_cast<std::size_t>(targets[row])]);
    for (std::size_t i = 0; i < vocabulary; ++i) {
      const double hit = static_cast<std::int32_t>(i) == targets[row] ? 1.0 : 0.0;
      result.gradient.push_back(ignored ? 0.0
                                        : grad_scale * slopes[row * vocabulary + i] *
                                              (std::exp(x[i] - max) / sum - hit));
    }
  }
  return result;
}

void check_size(DType dtype, std::int64_t rows, std::int64_t vocabulary, double spread,
                double softcap = 0) {
  CAPTURE(rows);
  CAPTURE(vocabulary);
  const Buffer input(dtype, {rows, vocabulary}, Buffer::normal(rows * vocabulary, 5, spread));
  std::vector<std::int32_t> targets;
  for (std::int64_t row = 0; row < rows; ++row)
    targets.push_back(row % 5 == 4 ? kIgnoreTarget
                                   : static_cast<std::int32_t>(row * 37 % vocabulary));
  constexpr double kScale = 0.25;
  const Expected expected = expected_of(input.values(), targets, kScale, softcap);
  const DType loss_dtype = accumulator_dtype(dtype);
  for_each_context([&](Context& context) {
    const IndexBuffer indices({rows}, targets);
    for (const bool write_gradient : {false, true}) {
      const Buffer logits(dtype, {rows, vocabulary}, input.values());
      const Buffer losses(loss_dtype, {rows}, 9.0);
      cross_entropy(
          context, {logits.view(), indices.view(), losses.view(), write_gradient, kScale, softcap});
      check_close(losses.values(), expected.losses, tolerance(loss_dtype), 1.0 + spread);
      check_close(logits.values(), write_gradient ? expected.gradient : input.values(),
                  tolerance(dtype), write_gradient ? 1.0 : 0.0);
    }
  });
}

TEST_CASE("cross_entropy matches float64, with and without gradient") {
  for (const DType dtype : kComputingDTypes) {
    for (const std::int64_t rows : {1, 3, 33})
      for (const std::int64_t vocabulary : kOddSizes) check_size(dtype, rows, vocabulary, 3.0);
    check_size(dtype, 7, 5003, 1.0);
    check_size(dtype, 2, 50257, 1.0);
  }
  check_size(DType::BF16, 2, 60001, 1.0);  // rows that shared memory can't keep
  check_size(DType::F32, 1, 70001, 1.0);   // blocks of more than 1024 on the CPU
}

TEST_CASE("cross_entropy of soft-capped logits matches float64") {
  for (const DType dtype : kComputingDTypes) {
    for (const std::int64_t vocabulary : {1, 31, 257, 5003}) {
      check_size(dtype, 7, vocabulary, 3.0, 5.0);
      check_size(dtype, 3, vocabulary, 30.0, 2.0);
    }
    check_size(dtype, 2, 31, 1e-3, 30.0);  // far from the cap
  }
}

TEST_CASE("cross_entropy gives the same losses with and without gradient, none negative") {
  for (const double softcap : {0.0, 30.0})
    for (const std::int64_t vocabulary : {1, 8, 65, 5003, 70001}) {
      CAPTURE(vocabulary);
      constexpr std::int64_t kRows = 50;
      const auto values = Buffer::normal(kRows * vocabulary, 3, 40.0);
      const IndexBuffer targets({kRows}, std::vector<std::int32_t>(kRows, 0));
      const auto context = Context::create({.threads = 1});
      std::vector<std::vector<double>> losses;
      for (const bool write_gradient : {false, true}) {
        const Buffer logits(DType::F32, {kRows, vocabulary}, values), loss(DType::F32, {kRows});
        cross_entropy(*context,
                      {logits.view(), targets.view(), loss.view(), write_gradient, 1.0, softcap});
        losses.push_back(loss.values());
      }
      CHECK(losses[0] == losses[1]);
      CHECK(*std::min_element(losses[0].begin(), losses[0].end()) >= 0.0);
    }
}

TEST_CASE("cross_entropy does not overflow on large logits") {
  for (const DType dtype : kComputingDTypes)
    for (const double spread : {1e4, 1e10, 1e30}) check_size(dtype, 6, 31, spread);
}

TEST_CASE("cross_entropy leaves the gaps between strided rows unchanged") {
  constexpr std::int64_t kRows = 5, kVocabulary = 31, kStride = 40;
  const auto values = Buffer::normal(kRows * kStride, 6);
  std::vector<double> dense;
  for (std::int64_t i = 0; i < kRows * kVocabulary; ++i)
    dense.push_back(values[static_cast<std::size_t>(i / kVocabulary * kStride + i % kVocabulary)]);
  std::vector<std::int32_t> targets = {0, 30, 7, kIgnoreTarget, 15};
  const Expected expected = expected_of(dense, targets, 1.0, 0);
  for_each_context([&](Context& context) {
    const IndexBuffer indices({kRows}, targets);
    const Buffer logits(DType::F64, {kRows, kStride}, values);
    const Buffer losses(DType::F64, {kRows});
    TensorView view = logits.view();
    view.shape = {kRows, kVocabulary};
    cross_entropy(context, {view, indices.view(), losses.view(), true, 1.0});
    check_close(losses.values(), expected.losses, 1e-14, 1.0);
    const auto after = logits.values();
    std::vector<double> gradient;
    bool kept = true;
    for (std::int64_t i = 0; i < kRows * kStride; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (i % kStride < kVocabulary)
        gradient.push_back(after[at]);
      else
        kept = kept && after[at] == values[at];
    }
    CHECK(kept);
    check_close(gradient, expected.gradient, 1e-14, 1.0);
  });
}

TEST_CASE("cross_entropy accepts misaligned rows and logits of -inf") {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for_each_context([&](Context& context) {
    for (std::int64_t offset = 0; offset < 4; ++offset) {
      constexpr std::int64_t kVocabulary = 90;
      std::vector<double> values(static_cast<std::size_t>(offset + kVocabulary), -kInf);
      values[static_cast<std::size_t>(offset + 1)] = 2.0;
      values[static_cast<std::size_t>(offset + 70)] = 2.0;
      const Buffer logits(DType::F32, {offset + kVocabulary}, values);
      const Buffer losses(DType::F32, {1});
      const IndexBuffer targets({1}, {70});
      TensorView view = logits.view();
      view.data = view.as<float>() + offset;
      view.shape = {1, kVocabulary};
      view.strides = {kVocabulary, 1};
      cross_entropy(context, {view, targets.view(), losses.view(), true, 1.0});
      check_close(losses.values(), {std::log(2.0)}, tolerance(DType::F32));
      std::vector<double> want(kVocabulary, 0.0);
      want[1] = 0.5;
      want[70] = -0.5;
      const auto after = logits.values();
      check_close({after.begin() + offset, after.end()}, want, tolerance(DType::F32), 1.0);
      CHECK(std::count(after.begin(), after.end(), -kInf) == offset);
    }
  });
}

/// A row of -inf up to `first`, then ascending by 90 to the end.
std::vector<double> ascending(std::int64_t first, std::int64_t vocabulary) {
  std::vector<double> row(static_cast<std::size_t>(vocabulary),
                          -std::numeric_limits<double>::infinity());
  for (std::int64_t i = first; i < vocabulary; ++i)
    row[static_cast<std::size_t>(i)] =
        90.0 * static_cast<double>(i) / static_cast<double>(vocabulary);
  return row;
}

TEST_CASE("cross_entropy of ascending rows, and of rows that start or are filled with -inf") {
  constexpr std::int64_t kVocabulary = 3001;
  for (const DType dtype : {DType::F32, DType::F64})
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1500}, kVocabulary}) {
      CAPTURE(first);
      const auto values = ascending(first, kVocabulary);
      const std::vector<std::int32_t> targets = {kVocabulary - 7};
      const Expected expected = expected_of(values, targets, 1.0, 0);
      for_each_context([&](Context& context) {
        for (const double cap : {0.0, 1e6}) {
          const Buffer logits(dtype, {1, kVocabulary}, values), losses(dtype, {1});
          const IndexBuffer indices({1}, targets);
          cross_entropy(context, {logits.view(), indices.view(), losses.view(), true, 1.0, cap});
          if (first == kVocabulary) {  // the cap makes equal finite logits of -inf
            const auto gradient = logits.values();
            CHECK(std::isnan(losses.values()[0]) == (cap == 0));
            CHECK(std::all_of(gradient.begin(), gradient.end(),
                              [=](double g) { return std::isnan(g) == (cap == 0); }));
            continue;
          }
          check_close(losses.values(), expected.losses, 1e-5, 1.0);
          check_close(logits.values(), expected.gradient, 1e-5, 1.0);
        }
      });
    }
}

TEST_CASE("cross_entropy of a row with NaN or infinity in its last block is NaN") {
  constexpr std::int64_t kVocabulary = 2500;
  for_each_context([&](Context& context) {
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      auto values = Buffer::normal(2 * kVocabulary, 4);
      values[2490] = bad;
      const Buffer logits(DType::F32, {2, kVocabulary}, values), losses(DType::F32, {2});
      const IndexBuffer targets({2}, {3, kIgnoreTarget});
      cross_entropy(context, {logits.view(), targets.view(), losses.view(), true, 1.0});
      const auto gradient = logits.values();
      CHECK(std::isnan(losses.values()[0]));
      CHECK(losses.values()[1] == 0.0);
      for (std::size_t i = 0; i < gradient.size(); ++i)
        CHECK((i < kVocabulary ? std::isnan(gradient[i]) : gradient[i] == 0.0));
    }
  });
}

TEST_CASE("cross_entropy starts whole warps, up to the block limit") {
  using Shape = kernels::cuda::CrossEntropyShape;
  CHECK(Shape::threads(1, 4) == 32);
  CHECK(Shape::threads(513, 4) == 64);
  CHECK(Shape::threads(50257, 4) == 1024);
  CHECK(Shape::threads(50257, 8) == 512);
  CHECK(Shape::threads(Shape::kMostColumns, 4) == 1024);
}

TEST_CASE("cross_entropy keeps rows of which a multiprocessor has room for two") {
  using Shape = kernels::cuda::CrossEntropyShape;
  const DeviceLimits h100{132, 227 * 1024}, a100{108, 163 * 1024};
  CHECK(Shape::keeps(50304 * 2 + 128, h100));
  CHECK(Shape::keeps(113 * 1024, h100));
  CHECK(!Shape::keeps(113 * 1024 + 1, h100));
  CHECK(!Shape::keeps(50304 * 2 + 128, a100));
}

TEST_CASE("cross_entropy on a device gives NaN for a target outside of the vocabulary") {
  for_each_context([](Context& context) {
    if (context.device().type == DeviceType::CPU) return;
    const Buffer logits(DType::F32, {3, 5}, 1.0), losses(DType::F32, {3});
    const IndexBuffer targets({3}, {5, 1, -2});
    cross_entropy(context, {logits.view(), targets.view(), losses.view(), true, 1.0});
    const auto loss = losses.values(), gradient = logits.values();
    CHECK(std::isnan(loss[0]));
    CHECK(std::isnan(loss[2]));
    CHECK(loss[1] == doctest::Approx(std::log(5.0)));
    for (std::size_t i = 0; i < gradient.size(); ++i)
      CHECK(std::isnan(gradient[i]) == (i / 5 != 1));
  });
}

}  // namespace
}  // namespace tessera::test
