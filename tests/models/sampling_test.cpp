#include "models/sampling.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "core/base/error.h"

using namespace tessera;
using models::sample;

namespace {

std::int32_t sample(const std::vector<float>& logits, const models::SamplingOptions& options,
                    const RngKey& key, std::uint64_t draw) {
  const Shape shape{1, static_cast<std::int64_t>(logits.size())};
  const Tensor row = Tensor::from<float>(Context::create(), shape, std::span(logits));
  return sample(row, options, key, draw).to_vector<std::int32_t>()[0];
}

const std::vector<float> kLogits = {1.0F, 3.0F, 2.0F, -1.0F, 3.0F};
constexpr RngKey kKey = RngKey::make(1, RngPurpose::Sampling, 0);

std::map<std::int32_t, int> histogram(const models::SamplingOptions& options, int draws) {
  std::map<std::int32_t, int> counts;
  for (int i = 0; i < draws; ++i)
    ++counts[sample(kLogits, options, kKey, static_cast<std::uint64_t>(i))];
  return counts;
}

}  // namespace

TEST_CASE("temperature 0 returns the most likely token, and the lower id of a tie") {
  CHECK(sample(kLogits, {.temperature = 0}, kKey, 0) == 1);
}

TEST_CASE("draws follow the softmax") {
  const auto counts = histogram({}, 20000);
  double total = 0;
  for (const float l : kLogits) total += std::exp(static_cast<double>(l));
  for (std::int32_t id = 0; id < 5; ++id) {
    const double expected =
        std::exp(static_cast<double>(kLogits[static_cast<std::size_t>(id)])) / total;
    CHECK(counts.at(id) / 20000.0 == doctest::Approx(expected).epsilon(0.1));
  }
}

TEST_CASE("top-k and top-p cut off the tail") {
  const auto top_k = histogram({.top_k = 3}, 2000);
  CHECK(top_k.size() == 3);
  CHECK(top_k.count(2) == 1);
  const auto top_1 = histogram({.top_k = 1}, 100);
  CHECK(top_1 == std::map<std::int32_t, int>{{1, 100}});
  const auto top_p = histogram({.top_p = 0.5}, 2000);
  CHECK(top_p.size() == 2);
  CHECK(histogram({.top_p = 1e-9}, 50).size() == 1);
  // The most likely have e times the probability of token 2, and e^2 that of token 0.
  CHECK(histogram({.min_p = 0.36}, 2000).size() == 3);
  CHECK(histogram({.min_p = 0.37}, 2000).size() == 2);
  CHECK(histogram({.temperature = 2, .min_p = 0.37}, 2000).size() == 3);
}

TEST_CASE("the repetition penalty lowers each token of a text once") {
  const Tensor row =
      Tensor::from<float>(Context::create(), {1, 5}, std::span<const float>(kLogits));
  const std::vector<std::int32_t> text = {3, 1, 1, 3};
  CHECK(models::penalize_repetition(row, text, 2.0).to_vector<float>() ==
        std::vector<float>{1.0F, 1.5F, 2.0F, -2.0F, 3.0F});
}

TEST_CASE("each row of a tensor draws from its own logits with its own counter") {
  const auto context = Context::create({.threads = 2});
  const std::int64_t batch = 7, vocab = 301;
  std::vector<float> logits(static_cast<std::size_t>(batch * vocab));
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = normal_at(kKey, i);
  const Tensor rows = Tensor::from<float>(context, {batch, vocab}, std::span<const float>(logits));
  for (const models::SamplingOptions& options :
       {models::SamplingOptions{}, {.temperature = 0}, {0.7, 40, 0.9}}) {
    const auto tokens = sample(rows, options, kKey, 100).to_vector<std::int32_t>();
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      const auto row = logits.begin() + static_cast<std::ptrdiff_t>(b) * vocab;
      CHECK(tokens[b] == sample({row, row + vocab}, options, kKey, 100 + b));
    }
  }
  CHECK_THROWS_WITH_AS(sample(Tensor::empty(context, {5}, DType::F32), {}, kKey, 0),
                       "logits must be [B, V], got shape [5]", InvalidArgument);
  CHECK_THROWS_AS(sample(Tensor::empty(context, {2, 0}, DType::F32), {}, kKey, 0), InvalidArgument);
  const Tensor wide = Tensor::empty(context, {8}, DType::F32);
  CHECK_THROWS_AS(sample(wide.alias({2, 2}, {4, 2}, 0), {}, kKey, 0), InvalidArgument);
  CHECK_THROWS_AS(sample(Tensor::empty(context, {2, 4}, DType::F64), {}, kKey, 0), Unsupported);
}

TEST_CASE("invalid options and logits are refused") {
  CHECK_THROWS_WITH_AS(sample(kLogits, {.temperature = -1}, kKey, 0),
                       "temperature must be 0 or more, got -1", InvalidArgument);
  CHECK_THROWS_AS(sample(kLogits, {.top_k = -1}, kKey, 0), InvalidArgument);
  CHECK_THROWS_AS(sample(kLogits, {.top_p = 0}, kKey, 0), InvalidArgument);
  CHECK_THROWS_AS(sample(kLogits, {.top_p = 1.5}, kKey, 0), InvalidArgument);
  CHECK_THROWS_AS(sample(kLogits, {.min_p = -0.1}, kKey, 0), InvalidArgument);
  CHECK_THROWS_AS(sample(kLogits, {.min_p = 1.1}, kKey, 0), InvalidArgument);
  CHECK_THROWS_AS(sample(kLogits, {.repetition_penalty = 0}, kKey, 0), InvalidArgument);
  CHECK_THROWS_AS(sample(std::vector<float>{}, {}, kKey, 0), InvalidArgument);
  const std::vector<float> nan = {1.0F, std::numeric_limits<float>::quiet_NaN()};
  CHECK_THROWS_AS(sample(nan, {}, kKey, 0), InvalidArgument);
  const std::vector<float> masked(3, -std::numeric_limits<float>::infinity());
  CHECK_THROWS_AS(sample(masked, {}, kKey, 0), InvalidArgument);
}
