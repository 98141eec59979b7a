#include "comm/control/rendezvous.h"

#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::Hello;

namespace {

std::vector<RankResult> meet(int callers, const std::function<Hello(int)>& hello,
                             std::chrono::milliseconds deadline = 5s) {
  comm::MemoryStore store;
  return run_ranks(callers, [&](int rank) { comm::rendezvous(store, hello(rank), deadline); });
}

Hello hello(int rank, int world) {
  Hello h = comm::make_hello(rank, world, "run", "build = 1\nmodel.n_layer = 12\nseed = 5");
  h.host = "node" + std::to_string(rank);
  h.pid = 100 + rank;
  return h;
}

}  // namespace

TEST_CASE("all ranks learn who the others are") {
  comm::MemoryStore store;
  const auto results = run_ranks(4, [&](int rank) {
    const auto all = comm::rendezvous(store, hello(rank, 4), 5s);
    for (int r = 0; r < 4; ++r) {
      const Hello& h = all.at(static_cast<std::size_t>(r));
      if (h.rank != r || h.process() != fmt::format("node{}, pid {}", r, 100 + r) ||
          h.run_id != "run" || h.world_size != 4) {
        throw std::runtime_error("wrong hello");
      }
    }
  });
  for (const RankResult& result : results) CHECK(result.error == "");
}

TEST_CASE("a rank that never comes is named to all, in time") {
  const Stopwatch watch;
  const auto results = meet(
      3, [](int caller) { return hello(caller == 2 ? 3 : caller, 4); }, 300ms);
  CHECK(watch.elapsed() < 3s);
  for (const RankResult& result : results) {
    CHECK(result.failure == CommFailure::Timeout);
    CHECK(result.culprits == std::vector<int>{2});
    CHECK(result.error == "rendezvous: 3 of 4 ranks arrived within 0.3 s, missing: rank 2");
  }
}

TEST_CASE("another configuration is refused with the line that differs") {
  const auto results = meet(3, [](int rank) {
    Hello h = hello(rank, 3);
    if (rank == 1) h.fingerprint = "build = 1\nmodel.n_layer = 24\nseed = 5";
    return h;
  });
  for (const RankResult& result : results) {
    CHECK(result.failure == CommFailure::Mismatch);
    CHECK(result.culprits == std::vector<int>{1});
    CHECK(result.error.find("rank 1 (node1, pid 101) has 'model.n_layer = 24', rank 0 (node0, pid "
                            "100) has 'model.n_layer = 12'") != std::string::npos);
  }
}

TEST_CASE("a configuration that is only longer differs too") {
  const auto results = meet(2, [](int rank) {
    Hello h = hello(rank, 2);
    if (rank == 1) h.fingerprint += "\nextra = 1";
    return h;
  });
  for (const RankResult& result : results) {
    CHECK(result.error.find("has 'extra = 1'") != std::string::npos);
  }
}

TEST_CASE("another world size is refused with both values, before the deadline") {
  const Stopwatch watch;
  const auto results = meet(
      3, [](int rank) { return hello(rank, rank == 1 ? 2 : 3); }, 20s);
  CHECK(watch.elapsed() < 5s);
  for (const RankResult& result : results) {
    CHECK(result.failure == CommFailure::Mismatch);
    CHECK(result.error.find("world size of") != std::string::npos);
    CHECK(result.error.find('2') != std::string::npos);
    CHECK(result.error.find('3') != std::string::npos);
  }
}

TEST_CASE("another run is refused") {
  const auto results = meet(2, [](int rank) {
    Hello h = hello(rank, 2);
    if (rank == 1) h.run_id = "stale";
    return h;
  });
  for (const RankResult& result : results) {
    CHECK(result.error.find("run id") != std::string::npos);
    CHECK(result.error.find("'stale'") != std::string::npos);
  }
}

TEST_CASE("a rank taken twice, and a rank out of range") {
  comm::MemoryStore store;
  const auto results = run_ranks(3, [&](int caller) {
    if (caller == 2) std::this_thread::sleep_for(100ms);
    Hello h = hello(caller == 2 ? 1 : caller, 2);
    h.pid = 100 + caller;
    comm::rendezvous(store, h, 2s);
  });
  CHECK(results[0].error == "");
  CHECK(results[1].error == "");
  CHECK(results[2].failure == CommFailure::Mismatch);
  CHECK(results[2].error.find("rank 1 is already taken") != std::string::npos);
  CHECK_THROWS_HOLDING(InvalidArgument, "rank 4 is out of range for world size 4",
                       comm::rendezvous(store, hello(4, 4), 1s));
  CHECK_THROWS_HOLDING(InvalidArgument, "rank -1 is out of range",
                       comm::rendezvous(store, hello(-1, 4), 1s));
}
