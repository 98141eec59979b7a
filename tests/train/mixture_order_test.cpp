// A mixture of three sources over 100,000 samples, as ranks load it.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "io/data/mixture.h"
#include "train/loader.h"
#include "train/ranks.h"

using namespace tessera;
using namespace tessera::train;

namespace {

constexpr std::int64_t kSampleCount = 100'800, kRowTokens = 2, kStepRows = 2'400;
constexpr std::int32_t kSourceIds = 1'000'000;  // ids of a source begin at a multiple
constexpr std::array<double, 3> kShares = {0.5, 0.3, 0.2};
constexpr std::array<std::int32_t, 3> kTokens = {60'001, 50'003,
                                                 90'007};  // 1.7, 1.2 and 0.4 epochs

io::Mixture three_sources() {
  std::vector<io::Mixture::Part> parts;
  for (std::size_t i = 0; i < kShares.size(); ++i) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(kTokens[i]));
    std::iota(ids.begin(), ids.end(), static_cast<std::int32_t>(i) * kSourceIds);
    parts.push_back({std::make_unique<io::Sampler>(io::token_ids_in_memory(ids), kRowTokens,
                                                   io::DataOrder::Shuffled, i),
                     kShares[i]});
  }
  return {std::move(parts), 7};
}

/// Inputs of all samples in the order of training, on a number of ranks.
std::vector<std::int32_t> inputs_on(int world) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(kSampleCount * kRowTokens));
  run_threads(world, [&](Rank& rank) {
    const io::Mixture mixture = three_sources();
    Loader loader(mixture, *rank.communicator, rank.context,
                  {.global_batch = kStepRows, .micro_batch = kStepRows / world / 2});
    for (std::int64_t position = 0; position < kSampleCount; position += kStepRows)
      for (std::int64_t m = 0; m < loader.micro_batches(); ++m) {
        const Batch batch = loader.micro_batch(position, m);
        const auto ids = batch.tokens.to_vector<std::int32_t>();
        std::copy(ids.begin(), ids.end(), all.begin() + batch.first * kRowTokens);
      }
  });
  return all;
}

}  // namespace

TEST_CASE("three sources keep their shares and order at any world size; no token twice an epoch") {
  const std::vector<std::int32_t> inputs = inputs_on(1);
  for (const int world : {2, 3, 8}) {
    const bool same = inputs_on(world) == inputs;
    CHECK_MESSAGE(same, world, " ranks");
  }

  std::array<std::int64_t, 3> rows{};
  std::array<std::vector<bool>, 3> seen;
  for (std::int64_t sample = 0; sample < kSampleCount; ++sample) {
    const auto first = static_cast<std::size_t>(sample * kRowTokens);
    const auto from = static_cast<std::size_t>(inputs[first] / kSourceIds);
    REQUIRE(from < 3);
    if (rows[from]++ % ((kTokens[from] - kRowTokens) / kRowTokens) == 0)  // an epoch
      seen[from].assign(static_cast<std::size_t>(kTokens[from]), false);
    for (std::size_t i = first; i < first + kRowTokens; ++i) {
      const auto token = static_cast<std::size_t>(inputs[i]) - from * kSourceIds;
      REQUIRE_FALSE(seen[from].at(token));
      seen[from][token] = true;
    }
    if (sample + 1 != 100'000) continue;
    for (std::size_t i = 0; i < 3; ++i)
      CHECK(std::abs(static_cast<double>(rows[i]) / 100'000 - kShares[i]) < 0.001);
  }
}
