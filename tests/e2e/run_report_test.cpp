// tessera run-report on runs that ended in different ways.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>
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

struct Fixture {
  test::TempDir dir{test::TempDir::in_memory()};
  std::string text = dir.write("text.txt", test::make_text(2000));
  std::string run = dir.file("run");

  nlohmann::json report() const {
    const auto result = run_cli({"run-report", run, "--json"});
    INFO(result.describe());
    REQUIRE(result.code == 0);
    return nlohmann::json::parse(result.out);
  }
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "the report names a killed rank, and the others log why they ended") {
  CliProcess process(joined(small_run(text, run, 3, 100'000),
                            {"--train.global_batch=3", "--checkpoint.every=20"}));
  REQUIRE(process.wait_for("saved"));
  const auto running = report();
  CHECK(running.at("state") == "running");
  CHECK(running.at("ranks").size() == 3);

  const auto ranks = process.ranks();
  REQUIRE(ranks.size() == 3);
  ::kill(ranks.at(2), SIGKILL);
  const auto ended = process.wait(std::chrono::seconds(30));
  INFO(ended.describe());
  CHECK(ended.code == 4);

  const auto dead = report();
  INFO(dead.dump(2));
  CHECK(dead.at("state") == "killed");
  CHECK(dead.at("culprits") == std::vector{2});
  CHECK(dead.at("ranks").at(2).at("pid") == ranks.at(2));
  CHECK(dead.at("ranks").at(2).at("process") == "gone");
  CHECK(dead.at("ranks").at(2).at("last").at("sequence") > 0);
  CHECK(dead.at("checkpoint").at("step") >= 20);

  const auto page = run_cli({"run-report", run});
  INFO(page.describe());
  CHECK(page.code == 0);
  CHECK(page.out.starts_with("rank 2 ("));
  CHECK(page.out.find(fmt::format("pid {}) was killed in ", ranks.at(2))) != std::string::npos);
  CHECK(page.out.find("tessera train --nproc 3 " + run + "/config.json") != std::string::npos);
  std::string logs;
  for (const int rank : {0, 1}) logs += dir.read(fmt::format("run/logs/rank-{}.log", rank));
  CHECK(logs.find("last collectives: rank") != std::string::npos);

  // The report's command resumes on fewer ranks; the new report covers only the new start.
  const auto again = run_cli({"train", "--nproc", "2", run + "/config.json", "--train.steps=200",
                              "--train.global_batch=4"});
  INFO(again.describe());
  CHECK(again.code == 0);
  const auto done = report();
  CHECK(done.at("state") == "done");
  CHECK(done.at("ranks").size() == 2);
  CHECK_FALSE(std::filesystem::exists(run + "/flight/rank-00002.bin"));
}

TEST_CASE_FIXTURE(Fixture, "a stopped rank is named while the others still wait for it") {
  CliProcess process(joined(small_run(text, run, 2, 100'000), {"--checkpoint.every=0"}));
  REQUIRE(process.wait_for("step      1/100000"));
  const auto ranks = process.ranks();
  REQUIRE(ranks.size() == 2);
  ::kill(ranks.at(1), SIGSTOP);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  nlohmann::json found;
  do {
    found = report();
  } while (found.at("state") == "running" && std::chrono::steady_clock::now() < end);
  INFO(found.dump(2));
  CHECK(found.at("state") == "stopped");
  CHECK(found.at("culprits") == std::vector{1});
  process.signal_group(SIGKILL);
  process.wait(std::chrono::seconds(10));
}

namespace {

// Ranks started by hand, with the same rendezvous address in every start.
struct ByHand : Fixture {
  std::string meeting = "127.0.0.1:" + test::meeting_port();

  std::unique_ptr<CliProcess> start(int rank, int steps, const test::Arguments& more = {}) const {
    const auto words = joined(small_run(text, run, 1, steps),
                              {"--rank", std::to_string(rank), "--world-size", "2", "--local-rank",
                               std::to_string(rank), "--rdzv", meeting});
    return std::make_unique<CliProcess>(joined(words, more));
  }
  void train(int steps) const {
    const auto zero = start(0, steps), one = start(1, steps);
    for (CliProcess* rank : {zero.get(), one.get()}) {
      const auto ended = rank->wait(std::chrono::seconds(60));
      INFO(ended.describe());
      REQUIRE(ended.code == 0);
    }
  }
};

}  // namespace

TEST_CASE_FIXTURE(ByHand, "a rank that exits next to a stopped rank 0 leaves its record") {
  const auto zero = start(0, 100'000, {"--checkpoint.every=0"});
  const auto one = start(1, 100'000, {"--checkpoint.every=0"});
  REQUIRE(zero->wait_for("step      1/100000"));
  zero->signal(SIGSTOP);
  const auto ended = one->wait(std::chrono::seconds(30));
  INFO(ended.describe());
  CHECK(ended.code == 4);
  CHECK(ended.err.find("culprit=rank 0 (") != std::string::npos);

  const auto stopped = report();
  INFO(stopped.dump(2));
  CHECK(stopped.at("state") == "stopped");
  CHECK(stopped.at("culprits") == std::vector{0});
  zero->signal(SIGKILL);
  zero->wait(std::chrono::seconds(10));
  const auto killed = report();
  INFO(killed.dump(2));
  CHECK(killed.at("state") == "killed");
  CHECK(killed.at("culprits") == std::vector{0});
  CHECK(killed.at("ranks").at(1).at("end") == "peer lost");
  CHECK(killed.at("ranks").at(1).at("text").get<std::string>().find("rank 0") != std::string::npos);
}

TEST_CASE_FIXTURE(ByHand, "a rank's record of an earlier start is ignored") {
  train(2);
  CHECK(report().at("state") == "done");
  // Rank 1 can't create its file, and its former one reports success.
  std::filesystem::create_directories(run + "/flight/rank-00001.bin.tmp");
  const auto zero = start(0, 100'000, {"--checkpoint.every=0"});
  const auto one = start(1, 100'000, {"--checkpoint.every=0"});
  REQUIRE(zero->wait_for("/100000"));
  one->signal(SIGKILL);
  const auto ended = zero->wait(std::chrono::seconds(30));
  INFO(ended.describe());
  CHECK(ended.code == 4);
  const auto dead = report();
  INFO(dead.dump(2));
  CHECK(dead.at("state") == "killed");
  CHECK(dead.at("culprits") == std::vector{1});
  const auto& missing = dead.at("ranks").at(1);
  CHECK_FALSE(missing.contains("end"));
  CHECK(missing.at("problem").get<std::string>().find("no record of this start") !=
        std::string::npos);
}

TEST_CASE_FIXTURE(ByHand,
                  "a start that fails before the rendezvous does not count as a finished run") {
  train(2);
  for (const int there : {0, 1}) {
    const auto ended = start(there, 4, {"--comm.init_timeout=2"})->wait(std::chrono::seconds(60));
    INFO(ended.describe());
    CHECK(ended.code == 4);
    const auto failed = report();
    INFO(failed.dump(2));
    CHECK(failed.at("state") == "never started");
    CHECK(failed.at("culprits") == std::vector{1 - there});
    CHECK(failed.at("ranks").at(there).at("end") == "timeout");
  }
  const auto waiting = start(0, 4);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (report().at("state") != "running" && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(milliseconds(10));
  waiting->signal(SIGKILL);
  waiting->wait(std::chrono::seconds(10));
  const auto killed = report();
  INFO(killed.dump(2));
  CHECK(killed.at("state") == "killed");
  CHECK(killed.at("culprits") == std::vector{0});
  train(4);
  CHECK(report().at("state") == "done");
}

TEST_CASE_FIXTURE(Fixture, "a refused job leaves the running job's records unchanged") {
  CliProcess process(joined(small_run(text, run, 2, 100'000), {"--checkpoint.every=0"}));
  REQUIRE(process.wait_for("step      1/100000"));
  const auto refused = run_cli(small_run(text, run, 2, 100'000));
  INFO(refused.describe());
  CHECK(refused.code == 2);
  CHECK(refused.err.find("in use by another run") != std::string::npos);
  const auto running = report();
  INFO(running.dump(2));
  CHECK(running.at("state") == "running");
  const auto ranks = process.ranks();
  for (const int rank : {0, 1}) CHECK(running.at("ranks").at(rank).at("pid") == ranks.at(rank));
  process.signal_group(SIGKILL);
  process.wait(std::chrono::seconds(10));
}

TEST_CASE_FIXTURE(Fixture, "in the records' directory, only files of earlier runs are removed") {
  namespace fs = std::filesystem;
  const auto train = [&](int steps) {
    const auto result = run_cli(small_run(text, run, 1, steps));
    INFO(result.describe());
    CHECK(result.code == 0);
  };
  train(1);
  const std::vector<std::string> foreign = {
      "rank-00007.txt", "rank-7.bin", "rank-00007.bin.tmp.old", "rank-7 notes", "rank-00007.binx"};
  for (const std::string& name : foreign) dir.write("run/flight/" + name, "mine");
  dir.write("keep", "mine");
  fs::create_symlink(dir.file("keep"), run + "/flight/rank-00008.bin");
  fs::create_directories(run + "/flight/rank-00009.bin");
  dir.write("run/flight/rank-00006.bin", "old");
  dir.write("run/flight/rank-00006.bin.tmp", "old");
  train(2);
  for (const std::string& name : foreign) {
    INFO(name);
    CHECK(dir.read("run/flight/" + name) == "mine");
  }
  CHECK(fs::is_symlink(run + "/flight/rank-00008.bin"));
  CHECK(fs::is_directory(run + "/flight/rank-00009.bin"));
  CHECK_FALSE(fs::exists(run + "/flight/rank-00006.bin"));
  CHECK_FALSE(fs::exists(run + "/flight/rank-00006.bin.tmp"));

  fs::remove_all(run + "/flight");
  fs::create_directories(dir.file("elsewhere"));
  dir.write("elsewhere/rank-00006.bin", "mine");
  fs::create_directory_symlink(dir.file("elsewhere"), run + "/flight");
  train(3);
  CHECK(dir.read("elsewhere/rank-00006.bin") == "mine");
  CHECK_FALSE(fs::exists(dir.file("elsewhere/rank-00000.bin")));
}

TEST_CASE_FIXTURE(Fixture, "a path that is no run is an I/O error") {
  for (const std::string& path : {dir.file("absent"), dir.path().string()}) {
    const auto result = run_cli({"run-report", path});
    INFO(result.describe());
    CHECK(result.code == 3);
    CHECK(result.err.find(path + " is not a ") != std::string::npos);
  }
}
