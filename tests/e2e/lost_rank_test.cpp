// Ranks that are refused, killed or stopped: the others exit soon and name them, or continue.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <csignal>
#include <memory>
#include <thread>

#include "tests/e2e/small_run.h"
#include "tests/support/meeting_port.h"

using namespace tessera;
using namespace tessera::test;
using std::chrono::milliseconds;

constexpr int kComm = 4;

TEST_CASE_FIXTURE(InMemory, "a rank that joins a complete run is refused, and the run continues") {
  const std::string port = meeting_port(), run = dir.file("run");
  const auto start = [&](int rank, int world) {
    return std::make_unique<CliProcess>(joined(small_run(text, run, 1, 1'000'000),
                                               {"--checkpoint.every=0", "--train.global_batch=12"}),
                                        rank_variables(rank, world, port));
  };
  const auto first = start(0, 2), second = start(1, 2);
  REQUIRE(first->wait_for("step       1/1000000"));
  struct Stranger {
    int rank, world;
    const char* why;
  };
  for (const Stranger& stranger :
       {Stranger{1, 2, "rank 1 is already taken by '"}, Stranger{2, 3, "world size"}}) {
    const auto refused = start(stranger.rank, stranger.world)->wait(std::chrono::seconds(20));
    CHECK(refused.code == kComm);
    CHECK(holds(refused.err, stranger.why));
    std::this_thread::sleep_for(milliseconds(1500));  // more than a heartbeat interval
    CHECK(first->running());
    CHECK(second->running());
  }
  first->signal(SIGTERM);
  end_of(*first, 128 + SIGTERM);
  end_of(*second, 128 + SIGTERM);
}

TEST_CASE_FIXTURE(InMemory,
                  "a rendezvous address that other hosts reach needs a token, checked at once") {
  for (const int rank : {0, 1}) {
    const auto result =
        run_to(2, joined(small_run(text, dir.file("run"), 1, 10), {"--comm.bind=0.0.0.0"}),
               rank_variables(rank, 2, "23999"));
    CHECK(holds(result.err, "export TESSERA_TOKEN="));
  }
}

// tests/faults kills ranks at all points of a run over the default backend.
TEST_CASE_FIXTURE(InMemory, "a rank that is killed is named over TCP, too") {
  for (const int victim : {0, 2}) {
    CAPTURE(victim);
    LongRun process(*this, 3, {"--comm.backend=tcp"});
    const pid_t killed = process.ranks().at(victim);
    const auto killed_at = std::chrono::steady_clock::now();
    ::kill(killed, SIGKILL);
    const auto result = end_of(process, kComm);
    CHECK(std::chrono::steady_clock::now() - killed_at < std::chrono::seconds(6));
    CHECK_FALSE(holds(result.err, "bug"));
    CHECK(holds(result.err, fmt::format("rank {} (pid {}) was killed by SIGKILL", victim, killed)));
    CHECK(holds(result.err, fmt::format("culprit=rank {} (", victim)));
    CHECK(holds(result.err, fmt::format(", pid {}, SIGKILL)", killed)));
    CHECK(holds(result.err, "  last collectives: "));
  }
}

TEST_CASE_FIXTURE(InMemory, "ranks do not outlive their launcher") {
  LongRun process(*this, 2);
  process.signal(SIGKILL);
  const auto result = process.wait(std::chrono::seconds(2));  // of the launcher and all ranks
  CHECK(result.in_time);
  CHECK(result.signal == SIGKILL);
}

TEST_CASE_FIXTURE(InMemory, "a host that sleeps longer than the heartbeat timeout ends nothing") {
  LongRun process(*this, 2);
  process.signal_group(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(6500));
  process.signal_group(SIGCONT);
  std::this_thread::sleep_for(milliseconds(1500));
  CHECK(process.running());
  CHECK(process.ranks().size() == 2);
  process.signal(SIGTERM);
  end_of(process, 128 + SIGTERM);
}

TEST_CASE_FIXTURE(InMemory, "ranks whose launcher is stopped exit with the same error") {
  LongRun process(*this, 2, {"--restarts=1", "--checkpoint.resume=never"});
  process.signal(SIGSTOP);
  CHECK(wait_until([&] { return process.ranks().empty(); }));
  process.signal(SIGCONT);
  // The launcher also reports that no rank is to blame.
  CHECK(process.wait_for("\ntessera: restart 1 of 1: the launcher was stopped for "));
  process.signal(SIGTERM);
  const auto result = process.wait(std::chrono::seconds(20));
  CHECK(holds(result.err, "\ntessera: the launcher was stopped for "));
  for (const char* prefix : {"\ntessera: error: E042 ", "\n[rank 1] tessera: error: E042 "}) {
    const auto at = result.err.find(prefix);
    REQUIRE(at != std::string::npos);
    const std::string line = result.err.substr(at, result.err.find('\n', at + 1) - at);
    CHECK(holds(line, " culprit=launcher, no answer action="));
    CHECK(holds(line, "the control channel is lost: the launcher, which serves it"));
  }
}

TEST_CASE_FIXTURE(InMemory, "a collective's deadline before the heartbeat's names the same rank") {
  LongRun process(*this, 2, {"--comm.timeout=2", "--restarts=1", "--checkpoint.resume=never"});
  ::kill(process.ranks().at(0), SIGSTOP);
  REQUIRE(process.wait_for("restart 1 of 1: "));
  CHECK(holds(process.err(), "restart 1 of 1: rank 0 did not arrive in time"));
  process.signal(SIGTERM);
  end_of(process, 128 + SIGTERM);
}
