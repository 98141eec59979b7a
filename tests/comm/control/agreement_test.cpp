#include "comm/control/agreement.h"

#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::MemoryStore;

TEST_CASE("memory store: keys are written once, and get waits for them") {
  MemoryStore store;
  CHECK_FALSE(store.has("a"));
  store.set("a", "1");
  store.set("a", "1");
  CHECK_THROWS_HOLDING(InvalidArgument, "'a' already has another value", store.set("a", "2"));
  CHECK(store.get("a", 0ms) == "1");
  CHECK_THROWS_HOLDING(CommError, "'b' was not set within 0.03 s", store.get("b", 30ms));
  std::thread writer([&] {
    std::this_thread::sleep_for(20ms);
    store.set("b", std::string("x\0y", 3));
  });
  CHECK(store.get("b", 10s) == std::string("x\0y", 3));
  writer.join();
}

TEST_CASE("exchange returns the values of all ranks, by rank") {
  MemoryStore store;
  const auto results = run_ranks(5, [&](int rank) {
    for (const char* name : {"step-1", "step-2"}) {
      const auto values =
          comm::exchange(store, name, rank, 5, fmt::format("{} {}", name, rank * rank), 10s);
      for (int r = 0; r < 5; ++r) {
        if (values.at(static_cast<std::size_t>(r)) != fmt::format("{} {}", name, r * r)) {
          throw std::runtime_error("wrong value");
        }
      }
    }
  });
  for (const RankResult& result : results) CHECK(result.error == "");
}

TEST_CASE("exchange names missing ranks, identically on punctual and late ranks") {
  MemoryStore store;
  const auto results = run_ranks(5, [&](int rank) {
    if (rank == 3) return;
    if (rank == 1) std::this_thread::sleep_for(400ms);
    comm::exchange(store, "save 12", rank, 5, "yes", rank == 0 ? 150ms : 300ms);
  });
  for (int rank : {0, 1, 2, 4}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    CHECK(result.failure == CommFailure::Timeout);
    CHECK(result.culprits == std::vector<int>{1, 3});
    CHECK(result.error == "save 12: 3 of 5 ranks answered within 0.15 s, missing: ranks 1, 3");
  }
}

TEST_CASE("an exchange succeeds on all ranks or on none, even with different deadlines") {
  // The last value arrives close to the first deadline, in every round.
  for (int round = 0; round < 20; ++round) {
    MemoryStore store;
    const auto results = run_ranks(3, [&](int rank) {
      if (rank == 2) std::this_thread::sleep_for(20ms);
      comm::exchange(store, "vote", rank, 3, "yes", rank == 0 ? 20ms : 2s);
    });
    CHECK(results[1].error == results[0].error);
    CHECK(results[2].error == results[0].error);
  }
}

TEST_CASE("a lost rank ends the waits for it, long before the deadline") {
  MemoryStore store;
  const auto results = run_ranks(3, [&](int rank) {
    if (rank == 2) {
      std::this_thread::sleep_for(50ms);
      comm::publish_verdict(store, CommError(CommFailure::PeerLost, {2}, "rank 2 was killed"));
      comm::publish_verdict(store, CommError(CommFailure::PeerLost, {0}, "what follows"));
      return;
    }
    comm::exchange(store, "vote", rank, 3, "yes", 1h);
  });
  for (const int rank : {0, 1}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    CHECK(result.failure == CommFailure::PeerLost);
    CHECK(result.culprits == std::vector<int>{2});
    CHECK(result.error == "rank 2 was killed");
  }
  // A value that all ranks have published is still agreed on.
  const auto late = run_ranks(
      2, [&](int rank) { CHECK(comm::exchange(store, "end", rank, 2, "yes", 10s).size() == 2); });
  for (const RankResult& result : late) CHECK(result.error == "");
}

TEST_CASE("the store deletes an exchange once all ranks have read it, not earlier") {
  MemoryStore store;
  const auto results = run_ranks(3, [&](int rank) {
    for (int i = 0; i < 1000; ++i) {
      const auto values = comm::exchange(store, fmt::format("save/{}/end", i), rank, 3,
                                         fmt::format("{}", rank + i), 10s);
      if (values[2] != fmt::format("{}", 2 + i)) throw std::runtime_error("wrong value");
      if (store.size() > 2 * 6) throw std::runtime_error("the store grows");
    }
  });
  for (const RankResult& result : results) CHECK(result.error == "");
  CHECK(store.size() == 0);

  store.set("a/0", "x");
  store.set("a/0/1", "of a/0");
  store.set("a0/1", "of a0");
  store.leave("a", 2);
  CHECK(store.get("a/0", 0ms) == "x");
  store.leave("a", 2);
  CHECK_FALSE(store.has("a/0"));
  CHECK(store.has("a/0/1"));
  CHECK(store.has("a0/1"));
}

TEST_CASE("a duplicate rank is refused") {
  MemoryStore store;
  store.set("vote/0", "somebody else");
  try {
    comm::exchange(store, "vote", 0, 1, "me", 1s);
    FAIL("accepted");
  } catch (const CommError& error) {
    CHECK(error.failure() == CommFailure::Mismatch);
    CHECK(std::string(error.what()).find("rank 0 is already taken by 'somebody else'") !=
          std::string::npos);
  }
}

TEST_CASE("errors survive their transfer through the store") {
  const CommError error(CommFailure::PeerLost, {1, 12}, "lost {} | {}", "a", "b");
  const CommError copy = comm::decode_error(comm::encode_error(error));
  CHECK(copy.failure() == CommFailure::PeerLost);
  CHECK(copy.culprits() == std::vector<int>{1, 12});
  CHECK(std::string(copy.what()) == "lost a | b");
  for (const char* text : {"", "|", "x|1|y", "9||y", "-1||y", "1"}) {
    CHECK(comm::decode_error(text).failure() == CommFailure::Mismatch);
  }
}
