#include "io/data/mixture.h"

#include <doctest/doctest.h>

#include <cmath>
#include <numeric>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::io;

namespace {

constexpr std::int64_t kSeqLen = 2;

/// Rows of two tokens: those of source `number` start at 10'000 * number.
Mixture::Part part(int number, std::int64_t rows, double share) {
  std::vector<std::uint16_t> ids(static_cast<std::size_t>(kSeqLen * rows + 1));
  std::iota(ids.begin(), ids.end(), static_cast<std::uint16_t>(10'000 * number));
  return {std::make_unique<Sampler>(tokens_in_memory(std::move(ids)), kSeqLen,
                                    DataOrder::Sequential, 1),
          share};
}

Mixture mixture(const std::vector<double>& shares, std::uint64_t seed = 1) {
  std::vector<Mixture::Part> parts;
  for (std::size_t i = 0; i < shares.size(); ++i)
    parts.push_back(part(static_cast<int>(i), 100 + 50 * static_cast<std::int64_t>(i), shares[i]));
  return Mixture(std::move(parts), seed);
}

}  // namespace

TEST_CASE("sources of a mixture have their shares, and give their own rows in their own order") {
  for (const std::vector<double>& shares : {std::vector{7.0, 2.0, 1.0},
                                            {0.001, 0.5, 0.001},
                                            {1.0},
                                            {1e-9, 1.0, 1.0, 3.0},
                                            std::vector(32, 0.25)}) {
    const Mixture mix = mixture(shares);
    const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
    std::vector<std::int64_t> rows(shares.size());
    constexpr std::int64_t kSamples = 102'400;
    for (std::int64_t sample = 0; sample < kSamples; ++sample) {
      const auto [from, row] = mix.place(sample);
      REQUIRE(row == rows[from]++);
      if ((sample + 1) % 4096 != 0) continue;
      for (std::size_t i = 0; i < shares.size(); ++i) {
        const double expected = shares[i] / sum * static_cast<double>(sample + 1);
        CHECK(std::abs(static_cast<double>(rows[i]) - expected) <= 32);
      }
    }
    for (std::size_t i = 0; i < shares.size(); ++i)
      CHECK(std::abs(static_cast<double>(rows[i]) / kSamples - shares[i] / sum) < 1e-3);
  }
}

TEST_CASE("rows of a mixture are those of its sources, in an order of its own for each seed") {
  const Mixture mix = mixture({1, 1, 2}), other = mixture({1, 1, 2}, 2);
  constexpr std::int64_t kRows = 600;
  std::vector<std::int32_t> inputs(kRows * kSeqLen), targets(kRows * kSeqLen);
  mix.fill_batch(1000, kRows, inputs.data(), targets.data());
  bool differs = false;
  for (std::int64_t i = 0; i < kRows; ++i) {
    const auto [from, row] = mix.place(1000 + i);
    const std::int64_t rows = 100 + 50 * static_cast<std::int64_t>(from);
    const std::int64_t first = 10'000 * static_cast<std::int64_t>(from) + row % rows * kSeqLen;
    const auto at = static_cast<std::size_t>(i * kSeqLen);
    CHECK(inputs[at] == first);
    CHECK(targets[at + 1] == first + 2);
    // One by one, as another number of ranks asks for them.
    std::int32_t input[kSeqLen], target[kSeqLen];
    mix.fill_batch(1000 + i, 1, input, target);
    CHECK(input[0] == inputs[at]);
    differs |= other.place(1000 + i) != mix.place(1000 + i);
  }
  CHECK(differs);
  CHECK(mix.samples_per_epoch() == 100 + 150 + 200);
}

TEST_CASE("shares are read from entries of data.train, all or none") {
  CHECK(parse_shares({"a.bin", "x=y.bin"}).empty());
  const auto sources = parse_shares({"a/*.bin=0.7", "b=c.bin=3"});
  REQUIRE(sources.size() == 2);
  CHECK(sources[0].pattern == "a/*.bin");
  CHECK(sources[0].share == 0.7);
  CHECK(sources[1].pattern == "b=c.bin");
  CHECK_THROWS_HOLDING(InvalidArgument, "give all of them one, or none",
                       parse_shares({"a.bin=1", "b.bin"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "a share must be above 0", parse_shares({"a.bin=0"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "a share must be above 0", parse_shares({"a.bin=nan"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "1 to 32 sources", Mixture({}, 1));
}
