// Failures of NCCL, ranks, devices and the store, with NCCL simulated on host threads.
#include <limits>

#include "comm/nccl.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/fake_nccl_ranks.h"
#include "tests/support/check_throws.h"
#include "tests/support/multiprocess.h"

using namespace tessera;
using namespace tessera::test;
using comm::ReduceOp;

TEST_CASE("a failure to start NCCL on one rank is reported on all ranks at once") {
  FakeRanks ranks(3);
  ranks.state(1)->fails_to_connect = true;
  ranks.state(0)->never_connects = true;  // a rank's absence blocks the others
  const Stopwatch watch;
  const auto results = run_ranks(3, [&](int rank) { ranks.join(rank); });
  CHECK(watch.elapsed() < 5s);
  for (const RankResult& result : results) {
    CHECK(result.error.find("NCCL 0.fake does not start on rank 1: no such device") == 0);
    CHECK(result.culprits == std::vector<int>{1});
  }
  for (const auto& state : ranks.states) CHECK(state->aborts == 1);
}

TEST_CASE("if NCCL never connects, the deadline holds, even if abort hangs too") {
  FakeRanks ranks(2);
  ranks.connect_timeout = 1s;
  for (const auto& state : ranks.states) {
    state->never_connects = true;
    state->abort_blocks = true;
  }
  const Stopwatch watch;
  const auto results = run_ranks(2, [&](int rank) { ranks.join(rank); });
  CHECK(watch.elapsed() < 5s);
  for (const RankResult& result : results) {
    CHECK(result.failure == CommFailure::Timeout);
    CHECK(result.error.find("did not connect 2 ranks within 1 s") != std::string::npos);
  }
}

TEST_CASE("a rank that does not arrive at the start is named before NCCL is called") {
  FakeRanks ranks(3);
  ranks.connect_timeout = 1s;
  const auto results = run_ranks(3, [&](int rank) {
    if (rank != 1) ranks.join(rank);
  });
  for (int r : {0, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(r)];
    CHECK(result.failure == CommFailure::Timeout);
    CHECK(result.error.find("missing: rank 1") != std::string::npos);
    CHECK(ranks.state(r)->inits == 0);
  }
}

TEST_CASE("a rank that does not call a collective is named by all ranks, including itself") {
  FakeRanks ranks(3);
  const Stopwatch watch;
  const auto results = run_ranks(3, [&](int rank) {
    const auto c = ranks.join(rank);
    meet(*c);
    ranks.state(rank)->collectives_end = false;
    std::vector<float> x(6);
    const Mirror<float> mirror(x);
    if (rank != 1) {
      c->start_all_gather(mirror.view(), {.label = "h.1"})->wait();
    }
    stay_until_failure(*c);
  });
  CHECK(watch.elapsed() < 2s);
  for (const RankResult& result : results) {
    CHECK(result.error == "all_gather#1 (h.1): 2 of 3 ranks arrived within 0.3 s, missing: rank 1");
    CHECK(result.culprits == std::vector<int>{1});
  }
  for (const auto& state : ranks.states) CHECK(state->aborts == 1);
  CHECK(ranks.stuck.empty());
}

TEST_CASE("a rank whose device is late is named, and the host's wait ends") {
  FakeRanks ranks(2);
  ranks.state(1)->collectives_start = false;
  ranks.state(0)->collectives_end = false;
  const auto results = run_ranks(2, [&](int rank) {
    const auto c = ranks.join(rank);
    double x = 1.0;
    c->all_reduce(dense_view(&x, DType::F64, {1}), ReduceOp::Sum, {.label = "norm"});
  });
  for (const RankResult& result : results) {
    CHECK(result.error.find("all_reduce#0 (norm): rank 1 called it, but the work before it") == 0);
    CHECK(result.culprits == std::vector<int>{1});
  }
}

TEST_CASE("an NCCL error for a lost peer names the rank that does not respond") {
  FakeRanks ranks(3);
  std::atomic<bool> is_gone = false;
  const auto results = run_ranks(3, [&](int rank) {
    auto c = ranks.join(rank);
    meet(*c);
    if (rank == 1) {
      c.reset();  // a rank that still runs would respond
      is_gone = true;
      return;  // without notice to the others
    }
    while (!is_gone) std::this_thread::sleep_for(1ms);
    ranks.state(rank)->fails_on_peer = true;
    stay_until_failure(*c);
  });
  for (int r : {0, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(r)];
    CHECK(result.failure == CommFailure::PeerLost);
    CHECK(result.culprits == std::vector<int>{1});
    CHECK(result.error.find("lost rank 1") != std::string::npos);
  }
}

TEST_CASE("without a store a rank launches nothing unpredicted, and blames no rank when late") {
  for (const bool is_new : {true, false}) {
    CAPTURE(is_new);
    FakeRanks ranks(2);
    std::atomic<bool> is_gone = false;
    ranks.store = std::make_shared<HookedStore>([&] {
      if (is_gone) throw CommError(CommFailure::PeerLost, {}, "the store is lost");
    });
    const auto results = run_ranks(2, [&](int rank) {
      const auto c = ranks.join(rank);
      for (int i = 0; i < 3; ++i) c->barrier({.label = "step", .deadline = 10s});
      is_gone = true;
      std::this_thread::sleep_for(50ms);
      c->check();
      ranks.state(rank)->collectives_end = false;
      c->barrier({.label = is_new ? "new" : "step"});
    });
    for (int r : {0, 1}) {
      const RankResult& result = results[static_cast<std::size_t>(r)];
      CAPTURE(result.error);
      CHECK(result.error.starts_with(
          fmt::format("barrier#3 ({}): rank {}: ", is_new ? "new" : "step", r)));
      CHECK(holds(result.error, "the store is lost"));
      CHECK(holds(result.error, "not done within 0.3 s") == !is_new);
      if (!is_new) CHECK(result.culprits.empty());
      CHECK(ranks.state(r)->launches == (is_new ? 3 : 4));
    }
  }
}

TEST_CASE("after a failure the first call reports it, and later calls refer to it") {
  FakeRanks ranks(1);
  const auto c = ranks.join(0);
  ranks.state(0)->collectives_end = false;
  CHECK_THROWS_HOLDING(CommError, "barrier#0 (step): ", c->barrier({.label = "step"}));
  CHECK_THROWS_HOLDING(CommError, "this communicator is dead; it failed before: barrier#0 (step)",
                       c->barrier({}));
  CHECK_THROWS_HOLDING(CommError, "is dead", c->check());
  device_context().reset();
}

TEST_CASE("data that arrive after an abort are not a result") {
  FakeRanks ranks(1);
  const auto c = ranks.join(0);
  ranks.state(0)->collectives_end = false;
  double x = 5.0;
  const auto work =
      c->start_all_reduce(dense_view(&x, DType::F64, {1}), ReduceOp::Sum, {.label = "norm"});
  c->abort("the disk is full");
  for (int i = 0; i < 1000 && ranks.state(0)->aborts == 0; ++i) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(20ms);  // its event is done by now
  CHECK_THROWS_HOLDING(CommError, "the disk is full", work->wait());
  CHECK(x == 5.0);
  device_context().reset();
}

TEST_CASE("an abort reaches all ranks, whatever they wait for") {
  FakeRanks ranks(3);
  const auto results = run_ranks(3, [&](int rank) {
    const auto c = ranks.join(rank);
    meet(*c);
    if (rank == 1) c->abort("the disk is full");
    stay_until_failure(*c);
  });
  for (const RankResult& result : results) {
    CHECK(result.failure == CommFailure::Aborted);
    CHECK(result.error == "rank 1 aborted communication: the disk is full");
  }
}

TEST_CASE("destruction waits for works that were waited for, aborts the rest, in bounded time") {
  for (const bool waited : {true, false}) {
    CAPTURE(waited);
    FakeRanks ranks(1);
    auto c = ranks.join(0);
    ranks.state(0)->collectives_end = false;
    std::vector<float> x(4);
    const Mirror<float> mirror(x);
    const auto work = c->start_all_gather(mirror.view(), {.label = "late", .deadline = 200ms});
    if (waited) work->wait();
    const Stopwatch watch;
    c.reset();
    CHECK(watch.elapsed() < 5s);
    CHECK((watch.wall() >= 100ms) == waited);
    CHECK(ranks.state(0)->aborts == 1);
    CHECK(ranks.state(0)->destroys == 0);
    CHECK(work->is_done());
    CHECK_THROWS_HOLDING(CommError, waited ? "late" : "destroyed", work->wait());
    device_context().reset();
  }
}

TEST_CASE("destruction does not wait forever for a hung device") {
  FakeRanks ranks(1);
  auto c = ranks.join(0);
  ranks.state(0)->collectives_start = false;
  std::vector<float> x(4);
  const Mirror<float> mirror(x);
  const auto work = c->start_all_gather(mirror.view(), {.label = "late"});
  work->wait();
  const Stopwatch watch;
  c.reset();
  CHECK(watch.elapsed() < 5s);
  CHECK_THROWS_HOLDING(CommError, "its device has not answered for 1.3 s", work->wait());
  device_context().reset();
}

TEST_CASE("if NCCL's abort hangs, the process is ended") {
  FakeRanks ranks(1);
  ranks.state(0)->collectives_end = false;
  ranks.state(0)->abort_blocks = true;
  auto c = ranks.join(0);
  CHECK_THROWS_HOLDING(CommError, "barrier#0", c->barrier({}));
  const Stopwatch watch;
  c.reset();  // leaves the aborting thread behind
  CHECK(watch.elapsed() < 5s);
  REQUIRE(ranks.stuck.size() == 1);
  CHECK(ranks.stuck[0].find("barrier#0") == 0);
  device_context().reset();
}

TEST_CASE("a launch that NCCL never finishes fails at its deadline") {
  FakeRanks ranks(2);
  const auto results = run_ranks(2, [&](int rank) {
    const auto c = ranks.join(rank);
    meet(*c);
    ranks.state(rank)->polls_in_progress = std::numeric_limits<int>::max();
    std::vector<float> x(2);
    const Mirror<float> mirror(x);
    const Stopwatch watch;
    CHECK_THROWS_AS(c->all_gather(mirror.view(), {.label = "h.1"}), CommError);
    expect(watch.wall() >= ranks.timeout && watch.elapsed() < 3s, "time", rank, 0);
    c->check();
  });
  for (const RankResult& result : results) {
    CHECK(result.error.find("all_gather#1 (h.1)") != std::string::npos);
  }
  for (const auto& state : ranks.states) CHECK(state->aborts == 1);
  CHECK(ranks.stuck.empty());
}

TEST_CASE("if a caller is stuck in NCCL, the process is ended") {
  for (const bool all : {false, true}) {  // false: the other rank notices
    CAPTURE(all);
    FakeRanks ranks(2);
    const auto results = run_ranks(2, [&](int rank) {
      const auto c = ranks.join(rank);
      const bool blocks = all || rank == 0;
      ranks.state(rank)->run_blocks = blocks;
      ranks.state(rank)->collectives_end = false;
      std::thread watcher;
      if (blocks) {
        watcher = std::thread([&, rank] {  // unblocks the call when the process would have ended
          for (int i = 0; i < 5000; ++i) {
            std::this_thread::sleep_for(1ms);
            const std::lock_guard lock(ranks.mutex);
            if (ranks.stuck.size() == (all ? 2U : 1U)) break;
          }
          ranks.state(rank)->is_over = true;
        });
      }
      std::vector<float> x(2);
      const Mirror<float> mirror(x);
      std::string error;
      try {
        c->all_gather(mirror.view(), {.label = "h.1"});
        stay_until_failure(*c);
      } catch (const CommError& failure) {
        error = failure.what();
      }
      if (watcher.joinable()) watcher.join();
      throw std::runtime_error(error);
    });
    CHECK(ranks.stuck.size() == (all ? 2 : 1));
    for (const RankResult& result : results) {
      CHECK(result.error.find("all_gather#0 (h.1)") != std::string::npos);
    }
  }
}

TEST_CASE(
    "the process is ended if, and only if, a caller does not notice within the grace period") {
  for (const bool notices : {false, true}) {
    FakeRanks ranks(1);
    const auto c = ranks.join(0);
    c->abort("enough");
    if (notices) CHECK_THROWS_AS(c->check(), CommError);
    for (int i = 0; i < 1000 && ranks.state(0)->aborts == 0; ++i) std::this_thread::sleep_for(5ms);
    std::this_thread::sleep_for(1500ms);  // more than the grace period
    const std::lock_guard lock(ranks.mutex);
    CHECK(ranks.stuck.size() == (notices ? 0U : 1U));
    device_context().reset();
  }
}

TEST_CASE("the process ends with the formatted error and exit code 4") {
  int out[2];
  REQUIRE(::pipe(out) == 0);
  Processes child(1, [&](int, const std::string&) -> std::string {
    ::dup2(out[1], STDERR_FILENO);
    comm::leave_process(CommError(CommFailure::Timeout, std::vector<int>{3}, "rank 3 is late"));
  });
  ::close(out[1]);
  child.go("go");
  const auto outcomes = child.wait(5s);
  CHECK(outcomes[0].exit_code == 4);
  char text[100] = {};
  const auto n = ::read(out[0], text, sizeof text - 1);
  CHECK(std::string(text, static_cast<std::size_t>(std::max<ssize_t>(n, 0))) ==
        "tessera: error: rank 3 is late\n");
  ::close(out[0]);
}
