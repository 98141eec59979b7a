#include "comm/threads.h"

#include <latch>

#include "tests/comm/mismatches.h"
#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::ReduceOp;

TEST_CASE("a rank that does not arrive is named by all others, at the deadline") {
  const Group group("threads", 4);
  std::latch failed(3);
  const Stopwatch watch;
  const auto results = run_ranks(4, [&](int rank) {
    const auto c = group.join(rank);
    std::vector<float> x(8);
    c->all_gather(view_of(x), {.label = "h.0"});
    if (rank == 2) return failed.wait();  // late, but alive
    const auto work = c->start_all_gather(view_of(x), {.label = "h.1", .deadline = 200ms});
    while (!work->is_done()) std::this_thread::sleep_for(1ms);
    failed.count_down();
    work->wait();
  });
  CHECK(watch.wall() >= 200ms);
  CHECK(watch.elapsed() < 3s);
  for (int rank : {0, 1, 3}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    CHECK(result.failure == CommFailure::Timeout);
    CHECK(result.culprits == std::vector<int>{2});
    CHECK(result.error == "all_gather#1 (h.1): 3 of 4 ranks arrived within 0.2 s, missing: rank 2");
  }
}

TEST_CASE("a late rank learns of the failure, and the communicator stays unusable") {
  const Group group("threads", 2);
  const auto results = run_ranks(2, [&](int rank) {
    const auto c = group.join(rank);
    if (rank == 1) std::this_thread::sleep_for(150ms);
    std::string first;
    try {
      c->barrier({.label = "start", .deadline = 50ms});
    } catch (const CommError& error) {
      first = error.what();
      if (error.failure() != CommFailure::Timeout) throw;
    }
    const Stopwatch watch;
    try {
      c->barrier({});
    } catch (const CommError& error) {
      if (watch.elapsed() > 2s) throw std::runtime_error("late");
      if (std::string(error.what()).find(first) == std::string::npos) {
        throw std::runtime_error("first failure not reported");
      }
      throw;
    }
  });
  for (const RankResult& result : results) {
    CHECK(result.failure == CommFailure::Aborted);
    CHECK(result.error.find("missing: rank 1") != std::string::npos);
    CHECK(result.culprits == std::vector<int>{1});
  }
}

TEST_CASE("a rank that has left is named at once, not at the deadline") {
  const Group group("threads", 3);
  const Stopwatch watch;
  const auto results = run_ranks(3, [&](int rank) {
    const auto c = group.join(rank);
    c->barrier({});
    if (rank == 0) throw std::runtime_error("out of data");
    c->barrier({.label = "step", .deadline = 60s});
  });
  CHECK(watch.elapsed() < 5s);
  for (int rank : {1, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    CHECK(result.failure == CommFailure::PeerLost);
    CHECK(result.culprits == std::vector<int>{0});
    CHECK(result.error.find("barrier#1 (step): rank 0 left") != std::string::npos);
  }
}

TEST_CASE("ranks that disagree all throw the same error before data move, and name the odd one") {
  for (const Mismatch& mismatch : mismatches()) {
    CAPTURE(mismatch.name);
    for (const int world : {2, 3, 4}) {
      for (int odd = first_odd(world); odd < world; ++odd) {
        CAPTURE(world);
        CAPTURE(odd);
        std::vector<std::vector<float>> buffers;
        for (int rank = 0; rank < world; ++rank)
          buffers.emplace_back(32, static_cast<float>(rank + 1));
        const auto before = buffers;
        const Group group("threads", world);
        const auto results = run_ranks(world, [&](int rank) {
          const auto c = group.join(rank);
          mismatch.call(*c, view_of(buffers[static_cast<std::size_t>(rank)]), rank == odd);
        });
        for (const RankResult& result : results) {
          CHECK(result.failure == CommFailure::Mismatch);
          CHECK(result.culprits == std::vector<int>{odd});
          CHECK(result.error.find(text_of(mismatch, world, odd)) != std::string::npos);
          CHECK(result.error == results[0].error);
        }
        if (!mismatch.is_later) CHECK(buffers == before);
      }
    }
  }
}

TEST_CASE("out-of-range ranks and empty groups are refused") {
  CHECK_THROWS_HOLDING(InvalidArgument, "world size 0", comm::ThreadGroup(0));
  const auto group = std::make_shared<comm::ThreadGroup>(2);
  CHECK_THROWS_HOLDING(InvalidArgument, "rank 2 is not a rank of a group of 2",
                       comm::make_threads_communicator(group, 2));
}
