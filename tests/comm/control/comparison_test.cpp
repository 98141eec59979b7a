#include "comm/control/comparison.h"

#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::RankText;

namespace {

std::optional<CommError> differences(const std::vector<std::string>& texts) {
  std::vector<RankText> ranks;
  for (const std::string& text : texts) {
    const int rank = static_cast<int>(ranks.size());
    ranks.push_back({rank, fmt::format("h{}, pid {}", rank, 10 + rank), text});
  }
  return comm::find_differences("join", ranks);
}

std::string message(const std::vector<std::string>& texts) {
  const auto error = differences(texts);
  return error ? error->what() : "";
}

}  // namespace

TEST_CASE("equal texts have no differences, whatever the order of their lines") {
  CHECK(message({"a = 1\nb = 2\n", "a = 1\nb = 2", "b = 2\na = 1\n"}) == "");
  CHECK(message({"", ""}) == "");
}

TEST_CASE("every differing field is reported, with the majority's value and all others") {
  const auto error = differences(
      {"a = 1\nb = 2\nc = 3", "a = 7\nb = 2\nc = 3", "a = 1\nb = 2\nc = 4", "a = 8\nb = 2\nc = 4"});
  REQUIRE(error);
  CHECK(error->failure() == CommFailure::Mismatch);
  CHECK(error->culprits() == std::vector<int>{1, 2, 3});
  CHECK(std::string(error->what()) ==
        "join: ranks 1, 2, 3 differ from the others in 2 fields: a: rank 1 (h1, pid 11) has '7', "
        "rank 3 (h3, pid 13) has '8', ranks 0, 2 have '1'; c: ranks 2, 3 have '4', ranks 0, 1 have "
        "'3'; start all ranks with the same program and configuration");
}

TEST_CASE("a missing field, a line without a value, and a duplicate field") {
  CHECK(message({"a = 1", "a = 1\nb = "})
            .find("b: rank 1 (h1, pid 11) has '', rank 0 (h0, pid 10) "
                  "has none") != std::string::npos);
  CHECK(message({"odd line", "other line"})
            .find("2 fields: odd line: rank 1 (h1, pid 11) has "
                  "none") != std::string::npos);
  CHECK(message({"a = 1\na = 2", "a = 1\na = 3"}).find("a (2): ") != std::string::npos);
  CHECK(message({"a = 1\na = 1", "a = 1"}).find("a (2): ") != std::string::npos);
}

TEST_CASE("long lists are truncated, with a count of the rest") {
  std::string many, others;
  for (int i = 0; i < 20; ++i) {
    many += fmt::format("f{} = 1\n", i);
    others += fmt::format("f{} = 2\n", i);
  }
  const std::string text = message({many, others});
  CHECK(text.find("in 20 fields: f0: ") != std::string::npos);
  CHECK(text.find("f7: ") != std::string::npos);
  CHECK(text.find("f8: ") == std::string::npos);
  CHECK(text.find("; and 12 fields more; start") != std::string::npos);

  const std::string value = message({"a = " + std::string(5000, 'x'), "a = 1"});
  CHECK(value.find("...' (5000 characters)") != std::string::npos);
  CHECK(value.size() < 600);

  std::vector<std::string> texts(100, "a = 1");
  for (int i = 50; i < 60; ++i) texts[static_cast<std::size_t>(i)] = fmt::format("a = {}", i);
  const std::string ranks = message(texts);
  CHECK(ranks.find("rank 53 (h53, pid 63) has '53', 6 more values, ranks 0, 1, 2, 3, 4, 5, 6, 7 "
                   "and 82 more have '1'") != std::string::npos);
}

TEST_CASE("ranks compare texts: all continue, or all get the error that names the odd one") {
  for (int world = 1; world <= 4; ++world) {
    for (int odd = -1; odd < (world > 1 ? world : 0); ++odd) {
      CAPTURE(world);
      CAPTURE(odd);
      comm::MemoryStore store;
      const auto results = run_ranks(world, [&](int rank) {
        comm::compare_among_ranks(store, "layout", rank, world,
                                  fmt::format("unit h.0 = {}\n", rank == odd ? "b" : "a"), 10s);
      });
      for (const RankResult& result : results) {
        CHECK(result.error == results[0].error);
        CHECK(result.error.empty() == (odd < 0));
        if (odd < 0) continue;
        CHECK(result.failure == CommFailure::Mismatch);
        // of two ranks, the lower one is the reference
        CHECK(result.culprits == std::vector<int>{world == 2 ? 1 : odd});
        CHECK(result.error.find("layout: rank ") == 0);
        CHECK(result.error.find("one field: unit h.0: rank ") != std::string::npos);
      }
    }
  }
}

TEST_CASE("a rank that does not join a comparison is named") {
  comm::MemoryStore store;
  CHECK_THROWS_HOLDING(CommError, "layout: 1 of 2 ranks answered within 0.05 s, missing: rank 1; ",
                       comm::compare_among_ranks(store, "layout", 0, 2, "a = 1", 50ms));
}
