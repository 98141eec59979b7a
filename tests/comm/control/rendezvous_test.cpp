#include "comm/control/rendezvous.h"

#include "comm/control/agreement.h"
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

TEST_CASE("all ranks learn each other's addresses") {
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

TEST_CASE("another configuration, world size or run is refused at once with both values") {
  struct Case {
    void (*change)(Hello&);
    std::vector<std::string> parts;
  };
  const Case cases[] = {
      {[](Hello& h) { h.fingerprint = "build = 1\nmodel.n_layer = 24\nseed = 5"; },
       {"model.n_layer: rank 1 (node1, pid 101) has '24'", "ranks 0, 2 have '12'"}},
      {[](Hello& h) { h.fingerprint += "\nextra = 1"; }, {"extra: rank 1", "have none"}},
      {[](Hello& h) { h.world_size = 2; }, {"world size: ", "has '2'", "'3'"}},
      {[](Hello& h) { h.run_id = "stale"; }, {"run id: rank 1", "has 'stale'", "have 'run'"}}};
  for (const Case& c : cases) {
    const Stopwatch watch;
    const auto results = meet(
        3,
        [&](int rank) {
          Hello h = hello(rank, 3);
          if (rank == 1) c.change(h);
          return h;
        },
        20s);
    CHECK(watch.elapsed() < 5s);
    for (const RankResult& result : results) {
      CAPTURE(result.error);
      CHECK(result.failure == CommFailure::Mismatch);
      for (const std::string& part : c.parts) CHECK(holds(result.error, part));
    }
    if (c.parts.size() == 2) CHECK(results[0].culprits == std::vector<int>{1});
  }
}

TEST_CASE("duplicate and out-of-range ranks are refused") {
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

TEST_CASE("each rank in turn never arrives: it is named, with the ranks that arrived") {
  struct Meeting {
    int world, absent;
    std::vector<RankResult> results;
  };
  std::vector<Meeting> meetings;
  for (int world = 2; world <= 4; ++world)
    for (int absent = 0; absent < world; ++absent) meetings.push_back({world, absent, {}});
  std::vector<std::thread> threads;  // in parallel, as each takes its whole deadline
  for (Meeting& m : meetings) {
    threads.emplace_back([&m] {
      m.results = meet(
          m.world - 1, [&](int caller) { return hello(caller + (caller >= m.absent), m.world); },
          1500ms);
    });
  }
  for (std::thread& thread : threads) thread.join();

  for (const Meeting& m : meetings) {
    CAPTURE(m.world);
    CAPTURE(m.absent);
    for (const RankResult& result : m.results) {
      CAPTURE(result.error);
      CHECK(result.failure == CommFailure::Timeout);
      CHECK(result.culprits == std::vector<int>{m.absent});
      CHECK(result.error.find(fmt::format("{} of {} ranks arrived within 1.5 s, missing: rank {}; "
                                          "arrived: rank {} (node",
                                          m.world - 1, m.world, m.absent, m.absent == 0 ? 1 : 0)) !=
            std::string::npos);
      for (int r = 0; r < m.world; ++r) {
        const bool told =
            result.error.find(fmt::format("(node{}, pid {})", r, 100 + r)) != std::string::npos;
        CHECK(told == (r != m.absent));
      }
    }
  }
}

TEST_CASE("each rank in turn arrives late, but in time: all meet") {
  for (int world = 2; world <= 4; ++world) {
    for (int late = 0; late < world; ++late) {
      comm::MemoryStore store;
      const auto results = run_ranks(world, [&](int rank) {
        if (rank == late) std::this_thread::sleep_for(60ms);
        if (comm::rendezvous(store, hello(rank, world), 20s).size() !=
            static_cast<std::size_t>(world)) {
          throw std::runtime_error("not all came");
        }
      });
      for (const RankResult& result : results) CHECK(result.error == "");
    }
  }
}

TEST_CASE("each rank in turn arrives after the deadline: it gets the others' verdict") {
  for (int late = 0; late < 3; ++late) {
    comm::MemoryStore store;
    const auto results = run_ranks(3, [&](int rank) {
      if (rank == late) {
        while (!store.has("rendezvous/outcome")) std::this_thread::sleep_for(5ms);
      }
      comm::rendezvous(store, hello(rank, 3), rank == late ? 10s : 100ms);
    });
    for (const RankResult& result : results) {
      CHECK(result.culprits == std::vector<int>{late});
      CHECK(result.error == results[0].error);
    }
  }
}

TEST_CASE(
    "a rank whose exit the launcher saw ends the rendezvous, with the reason and the ranks that "
    "arrived") {
  comm::MemoryStore store;
  const Stopwatch watch;
  const auto results = run_ranks(3, [&](int rank) {
    if (rank != 1) comm::rendezvous(store, hello(rank, 3), 60s);
    while (!store.has("rendezvous/0") || !store.has("rendezvous/2")) {
      std::this_thread::sleep_for(5ms);
    }
    comm::publish_verdict(
        store, CommError(CommFailure::PeerLost, {1}, "rank 1 (pid 101) was killed by SIGSEGV"));
  });
  CHECK(watch.elapsed() < 20s);
  for (const int rank : {0, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    CHECK(result.failure == CommFailure::PeerLost);
    CHECK(result.culprits == std::vector<int>{1});
    CHECK(result.error ==
          "rendezvous: rank 1 (pid 101) was killed by SIGSEGV; arrived: rank 0 (node0, pid 100), "
          "rank 2 (node2, pid 102)");
  }
}
