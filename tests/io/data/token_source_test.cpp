#include "io/data/token_source.h"

#include <doctest/doctest.h>

#include <memory>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::io;

namespace {

std::vector<std::int32_t> read(const TokenSource& source, std::int64_t begin, std::int64_t count) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(count));
  source.read(begin, count, out.data());
  return out;
}

using Ids = std::vector<std::int32_t>;

}  // namespace

TEST_CASE("a concatenation reads across its parts, including empty ones") {
  const auto joined = concatenate_tokens({tokens_in_memory({0, 1, 2}), tokens_in_memory({}),
                                          tokens_in_memory({3}), tokens_in_memory({4, 5})});
  CHECK(joined->size() == 6);
  for (std::int64_t begin = 0; begin <= 6; ++begin) {
    for (std::int64_t count = 0; begin + count <= 6; ++count) {
      Ids expected;
      for (std::int64_t i = 0; i < count; ++i) {
        expected.push_back(static_cast<std::int32_t>(begin + i));
      }
      CHECK(read(*joined, begin, count) == expected);
    }
  }
  CHECK_THROWS_HOLDING(InvalidArgument, "got none", concatenate_tokens({}));
}

TEST_CASE("a prefetch covers the same tokens as a read") {
  struct Recorder final : TokenSource {
    std::int64_t size() const override { return 5; }
    void read(std::int64_t, std::int64_t, std::int32_t*) const override {}
    void prefetch(std::int64_t begin, std::int64_t count) const override {
      asked.emplace_back(begin, count);
    }
    mutable std::vector<std::pair<std::int64_t, std::int64_t>> asked;
  };
  const auto first = std::make_shared<Recorder>();
  const auto second = std::make_shared<Recorder>();
  const auto joined = concatenate_tokens({first, slice_tokens(second, 1, 5)});
  joined->prefetch(3, 4);
  CHECK(first->asked == std::vector<std::pair<std::int64_t, std::int64_t>>{{3, 2}});
  CHECK(second->asked == std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 2}});
  CHECK_THROWS_AS(joined->prefetch(8, 2), InvalidArgument);
  CHECK_THROWS_AS(tokens_in_memory({1})->prefetch(0, 2), InvalidArgument);
}

TEST_CASE("a slice has its own positions and checks its ends") {
  const auto all = tokens_in_memory({10, 11, 12, 13, 14});
  const auto part = slice_tokens(all, 1, 4);
  CHECK(part->size() == 3);
  CHECK(read(*part, 0, 3) == Ids{11, 12, 13});
  CHECK(read(*part, 2, 1) == Ids{13});
  CHECK_THROWS_HOLDING(InvalidArgument, "has 3", read(*part, 1, 3));
  CHECK_THROWS_HOLDING(InvalidArgument, "has 3", read(*part, -1, 1));
  CHECK_THROWS_AS(slice_tokens(all, 3, 6), InvalidArgument);
  CHECK_THROWS_AS(slice_tokens(all, 3, 2), InvalidArgument);
  CHECK(slice_tokens(all, 5, 5)->size() == 0);
}

TEST_CASE("a range whose end overflows is refused") {
  CHECK_THROWS_AS(check_token_range(1, INT64_MAX, 10), InvalidArgument);
  CHECK_THROWS_AS(check_token_range(INT64_MAX, 1, 10), InvalidArgument);
  CHECK_NOTHROW(check_token_range(10, 0, 10));
}

TEST_CASE("the largest id is found beyond one block") {
  std::vector<std::uint16_t> ids(100000, 7);
  ids[99999] = 65535;
  CHECK(max_token_id(*tokens_in_memory(ids)) == 65535);
  CHECK(max_token_id(*tokens_in_memory({})) == -1);
}
