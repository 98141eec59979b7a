#include "io/data/sampler.h"

#include <doctest/doctest.h>

#include <cmath>
#include <set>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::io;

namespace {

/// Tokens 0, 1, 2, ...: each equals its position.
TokenSourcePtr counting(std::int64_t size) {
  std::vector<std::uint16_t> ids(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::uint16_t>(i);
  return tokens_in_memory(std::move(ids));
}

}  // namespace

TEST_CASE("sequential rows are consecutive and wrap after the last whole row") {
  const Sampler sampler(counting(20), 6, DataOrder::Sequential, 1);
  CHECK(sampler.samples_per_epoch() == 3);  // rows need tokens 0..6, 6..12, 12..18
  CHECK(sampler.first_token(0) == 0);
  CHECK(sampler.first_token(2) == 12);
  CHECK(sampler.first_token(3) == 0);
  CHECK(Sampler(counting(19), 6, DataOrder::Sequential, 1).samples_per_epoch() == 3);
  CHECK(Sampler(counting(18), 6, DataOrder::Sequential, 1).samples_per_epoch() == 2);
}

TEST_CASE("a batch contains inputs, and targets one token later") {
  const Sampler sampler(counting(50), 4, DataOrder::Sequential, 1);
  std::vector<std::int32_t> inputs(12), targets(12);
  sampler.fill_batch(11, 3, inputs.data(), targets.data());
  CHECK(inputs == std::vector<std::int32_t>{44, 45, 46, 47, 0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(targets == std::vector<std::int32_t>{45, 46, 47, 48, 1, 2, 3, 4, 5, 6, 7, 8});
}

TEST_CASE("an epoch of shuffled rows visits every window once, with one common offset") {
  for (const std::int64_t size : {6, 7, 10, 11, 12, 27, 53, 1000, 5003, 60000}) {
    for (const std::int64_t seq_len : {1, 3, 5}) {
      const Sampler sampler(counting(size), seq_len, DataOrder::Shuffled, 42);
      const std::int64_t rows = sampler.samples_per_epoch();
      REQUIRE(rows >= 1);
      CHECK(rows >= (size - 1) / seq_len - 1);  // the offset costs at most one window
      for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
        std::set<std::int64_t> starts;
        for (std::int64_t row = 0; row < rows; ++row) {
          starts.insert(sampler.first_token(epoch * rows + row));
        }
        REQUIRE(static_cast<std::int64_t>(starts.size()) == rows);
        CHECK(*starts.begin() >= 0);
        CHECK(*starts.begin() < seq_len);
        CHECK(*starts.rbegin() - *starts.begin() == (rows - 1) * seq_len);
        CHECK(*starts.rbegin() + seq_len + 1 <= size);
      }
    }
  }
}

TEST_CASE("the shuffled order depends on seed and epoch only") {
  const auto order = [](std::uint64_t seed, std::int64_t epoch) {
    const Sampler sampler(counting(4001), 4, DataOrder::Shuffled, seed);
    std::vector<std::int64_t> starts;
    for (std::int64_t i = 0; i < 100; ++i) {
      starts.push_back(sampler.first_token(epoch * sampler.samples_per_epoch() + i) / 4);
    }
    return starts;
  };
  CHECK(order(1, 0) == order(1, 0));
  CHECK(order(1, 0) != order(2, 0));
  CHECK(order(1, 0) != order(1, 1));
}

TEST_CASE("shuffled windows and offsets are evenly distributed") {
  // Mean distance between neighbours in a random permutation of n: n / 3.
  const Sampler sampler(counting(50001), 5, DataOrder::Shuffled, 7);
  const std::int64_t rows = sampler.samples_per_epoch();
  double distance = 0;
  for (std::int64_t i = 1; i < rows; ++i) {
    distance +=
        std::abs(static_cast<double>(sampler.first_token(i) - sampler.first_token(i - 1)) / 5);
  }
  const double mean = distance / static_cast<double>(rows - 1);
  CHECK(mean == doctest::Approx(static_cast<double>(rows) / 3).epsilon(0.03));

  std::vector<int> offsets(5);
  for (std::int64_t epoch = 0; epoch < 1000; ++epoch) {
    ++offsets[static_cast<std::size_t>(sampler.first_token(epoch * rows) % 5)];
  }
  for (const int count : offsets) CHECK(std::abs(count - 200) < 70);  // 5 standard deviations
}

TEST_CASE("the order of the first rows is pinned: resumed runs depend on it") {
  const Sampler sampler(counting(1000), 8, DataOrder::Shuffled, 1337);
  std::vector<std::int64_t> starts;
  for (std::int64_t i = 0; i < 6; ++i) starts.push_back(sampler.first_token(i));
  CHECK(starts == std::vector<std::int64_t>{364, 164, 876, 28, 916, 844});
}

TEST_CASE("positions far beyond the first epoch stay in range") {
  const Sampler sampler(counting(100), 8, DataOrder::Shuffled, 3);
  const std::int64_t start = sampler.first_token(INT64_MAX);
  CHECK(start >= 0);
  CHECK(start + 9 <= 100);
  CHECK_THROWS_AS(sampler.first_token(-1), InvalidArgument);
}

TEST_CASE("data shorter than one row are refused in one sentence") {
  CHECK_NOTHROW(Sampler(counting(9), 8, DataOrder::Shuffled, 1));
  CHECK_THROWS_HOLDING(InvalidArgument, "validation data has 8 tokens, but a row needs",
                       Sampler(counting(8), 8, DataOrder::Shuffled, 1, "validation data"));
  CHECK_THROWS_HOLDING(InvalidArgument, "seq_len", Sampler(counting(8), 0, DataOrder::Shuffled, 1));
  CHECK(parse_data_order("sequential") == DataOrder::Sequential);
  CHECK_THROWS_HOLDING(InvalidArgument, "random", parse_data_order("random"));
}
