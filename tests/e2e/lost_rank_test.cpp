// Ranks that never arrive, are killed or stopped: the others exit soon and name them.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <csignal>
#include <memory>
#include <thread>

#include "tests/e2e/small_run.h"
#include "tests/support/meeting_port.h"

using namespace tessera;
using std::chrono::milliseconds;
using test::CliProcess;
using test::joined;
using test::run_cli;
using test::small_run;

namespace {

constexpr int kComm = 4;

struct Fixture {
  test::TempDir dir{test::TempDir::in_memory()};
  std::string text = dir.write("text.txt", test::make_text(2000));
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "a rank that never arrives is named at the deadline") {
  const std::string port = test::meeting_port();
  const auto alone = [&](int rank) {
    return run_cli(joined(small_run(text, dir.file("run"), 1, 10), {"--comm.init_timeout=2"}),
                   test::rank_variables(rank, 2, port));
  };
  const auto first = alone(0);
  INFO(first.describe());
  CHECK(first.code == kComm);
  CHECK(first.time < milliseconds(10'000));
  CHECK(first.err.find("1 of 2 ranks arrived") != std::string::npos);
  CHECK(first.err.find("missing: rank 1") != std::string::npos);
  CHECK_FALSE(std::filesystem::exists(dir.file("run")));

  const auto second = alone(1);
  INFO(second.describe());
  CHECK(second.code == kComm);
  CHECK(second.time < milliseconds(10'000));
  CHECK(second.err.find("127.0.0.1") != std::string::npos);
  CHECK(second.err.find("rank 0") != std::string::npos);
}

TEST_CASE_FIXTURE(Fixture, "a rank that joins a complete run is refused, and the run continues") {
  const std::string port = test::meeting_port(), run = dir.file("run");
  const auto start = [&](int rank, int world) {
    return std::make_unique<CliProcess>(joined(small_run(text, run, 1, 1'000'000),
                                               {"--checkpoint.every=0", "--train.global_batch=12"}),
                                        test::rank_variables(rank, world, port));
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
    INFO(refused.describe());
    CHECK(refused.code == kComm);
    CHECK(refused.err.find(stranger.why) != std::string::npos);
    std::this_thread::sleep_for(milliseconds(1500));  // more than a heartbeat interval
    CHECK(first->running());
    CHECK(second->running());
  }
  first->signal(SIGTERM);
  for (const auto& rank : {first.get(), second.get()}) {
    const auto result = rank->wait(std::chrono::seconds(20));
    INFO(result.describe());
    CHECK(result.code == 128 + SIGTERM);
  }
}

TEST_CASE_FIXTURE(Fixture,
                  "a rendezvous address that other hosts reach needs a token, checked at once") {
  for (const int rank : {0, 1}) {
    const auto result =
        run_cli(joined(small_run(text, dir.file("run"), 1, 10), {"--comm.bind=0.0.0.0"}),
                test::rank_variables(rank, 2, "23999"));
    INFO(result.describe());
    CHECK(result.code == 2);
    CHECK(result.err.find("export TESSERA_TOKEN=") != std::string::npos);
  }
}

TEST_CASE_FIXTURE(Fixture, "a killed rank ends the others soon, and they name it") {
  std::mt19937 random(7);
  for (const int victim : {0, 1, 2}) {
    const int world = victim + 2;
    // Between saves over each backend, and mostly within saves.
    struct Run {
      std::string every;
      std::string backend;
    };
    for (const Run& setting : {Run{"1000", "tcp"}, Run{"1000", "shm"}, Run{"1", "auto"}}) {
      const std::string& every = setting.every;
      const std::string& backend = setting.backend;
      CAPTURE(victim);
      CAPTURE(world);
      CAPTURE(every);
      CAPTURE(backend);
      const std::string run = dir.file(fmt::format("run-{}-{}-{}", victim, every, backend));
      CliProcess process(joined(
          small_run(text, run, world, 100'000),
          {"--train.global_batch=12", "--checkpoint.every=" + every, "--comm.backend=" + backend}));
      REQUIRE(process.wait_for(every == "1" ? "saved" : "step      1/100000"));
      std::this_thread::sleep_for(milliseconds(random() % 60));
      const auto ranks = process.ranks();
      REQUIRE(ranks.size() == static_cast<std::size_t>(world));
      const auto killed_at = std::chrono::steady_clock::now();
      ::kill(ranks.at(victim), SIGKILL);
      const auto result = process.wait(std::chrono::seconds(20));
      INFO(result.describe());
      const auto survived = std::chrono::steady_clock::now() - killed_at;
      CHECK(survived < milliseconds(6000));  // generous; tests/faults measures the time
      CHECK(result.code == kComm);
      const auto culprit =
          fmt::format("rank {} (pid {}) was killed by SIGKILL", victim, ranks.at(victim));
      CHECK(result.err.find(culprit) != std::string::npos);
      CHECK(result.err.find(fmt::format("culprit=rank {} (", victim)) != std::string::npos);
      CHECK(result.err.find(fmt::format(", pid {}, SIGKILL)", ranks.at(victim))) !=
            std::string::npos);
      CHECK(result.err.find("  last collectives: ") != std::string::npos);
      CHECK(result.err.find("bug") == std::string::npos);
      if (every == "1") CHECK(run_cli({"checkpoint", "verify", run}).code == 0);
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "ranks do not outlive their launcher") {
  CliProcess process(
      joined(small_run(text, dir.file("run"), 2, 100'000), {"--checkpoint.every=0"}));
  REQUIRE(process.wait_for("step      1/100000"));
  REQUIRE(process.ranks().size() == 2);
  process.signal(SIGKILL);
  const auto result = process.wait(std::chrono::seconds(2));  // of the launcher and all ranks
  INFO(result.describe());
  CHECK(result.in_time);
  CHECK(result.signal == SIGKILL);
}

TEST_CASE_FIXTURE(Fixture, "a host that sleeps longer than the heartbeat timeout ends nothing") {
  CliProcess process(
      joined(small_run(text, dir.file("run"), 2, 100'000), {"--checkpoint.every=0"}));
  REQUIRE(process.wait_for("step      1/100000"));
  process.signal_group(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(6500));
  process.signal_group(SIGCONT);
  std::this_thread::sleep_for(milliseconds(1500));
  CHECK(process.running());
  CHECK(process.ranks().size() == 2);
  process.signal(SIGTERM);
  const auto result = process.wait(std::chrono::seconds(20));
  INFO(result.describe());
  CHECK(result.code == 128 + SIGTERM);
}

TEST_CASE_FIXTURE(Fixture, "ranks whose launcher is stopped exit with the same error") {
  CliProcess process(joined(small_run(text, dir.file("run"), 2, 100'000),
                            {"--checkpoint.every=0", "--restarts=1", "--checkpoint.resume=never"}));
  REQUIRE(process.wait_for("step      1/100000"));
  REQUIRE(process.ranks().size() == 2);
  process.signal(SIGSTOP);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!process.ranks().empty() && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(milliseconds(10));
  CHECK(process.ranks().empty());
  process.signal(SIGCONT);
  // The launcher also reports that no rank is to blame.
  CHECK(process.wait_for("\ntessera: restart 1 of 1: the launcher was stopped for "));
  process.signal(SIGTERM);
  const auto result = process.wait(std::chrono::seconds(20));
  INFO(result.describe());
  CHECK(result.err.find("\ntessera: the launcher was stopped for ") != std::string::npos);
  for (const char* prefix : {"\ntessera: error: E042 ", "\n[rank 1] tessera: error: E042 "}) {
    const auto at = result.err.find(prefix);
    REQUIRE(at != std::string::npos);
    const std::string line = result.err.substr(at + 1, result.err.find('\n', at + 1) - at);
    CHECK(line.find(" culprit=launcher, no answer action=") != std::string::npos);
    CHECK(line.find("the control channel is lost: the launcher, which serves it") !=
          std::string::npos);
  }
}

TEST_CASE_FIXTURE(Fixture, "a collective's deadline before the heartbeat's names the same rank") {
  CliProcess process(joined(
      small_run(text, dir.file("run"), 2, 100'000),
      {"--checkpoint.every=0", "--comm.timeout=2", "--restarts=1", "--checkpoint.resume=never"}));
  REQUIRE(process.wait_for("step      1/100000"));
  ::kill(process.ranks().at(0), SIGSTOP);
  REQUIRE(process.wait_for("restart 1 of 1: "));
  CHECK(process.err().find("restart 1 of 1: rank 0 did not arrive in time") != std::string::npos);
  process.signal(SIGTERM);
  const auto result = process.wait(std::chrono::seconds(20));
  INFO(result.describe());
  CHECK(result.code == 128 + SIGTERM);
}
