// tessera run-report on runs that ended in different ways.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "tests/e2e/small_run.h"
#include "tests/support/meeting_port.h"

using namespace tessera;
using namespace tessera::test;

namespace {

struct Reported : InMemory {
  std::string run = dir.file("run");

  nlohmann::json report() const { return json_of({"run-report", run}); }
  nlohmann::json report(const std::string& state, int culprit) const {
    const auto found = report();
    INFO(found.dump(2));
    CHECK(found.at("state") == state);
    CHECK(found.at("culprits") == std::vector{culprit});
    return found;
  }
};

}  // namespace

TEST_CASE_FIXTURE(Reported, "the report names a killed rank, and the others log why they ended") {
  CliProcess process(joined(small_run(text, run, 3, 100'000),
                            {"--train.global_batch=3", "--checkpoint.every=20"}));
  REQUIRE(process.wait_for("saved"));
  const auto running = report();
  CHECK(running.at("state") == "running");
  CHECK(running.at("ranks").size() == 3);

  const auto ranks = process.ranks();
  REQUIRE(ranks.size() == 3);
  ::kill(ranks.at(2), SIGKILL);
  end_of(process, 4);

  const auto dead = report("killed", 2);
  CHECK(dead.at("ranks").at(2).at("pid") == ranks.at(2));
  CHECK(dead.at("ranks").at(2).at("process") == "gone");
  CHECK(dead.at("ranks").at(2).at("last").at("sequence") > 0);
  CHECK(dead.at("checkpoint").at("step") >= 20);

  const auto page = run_to(0, {"run-report", run});
  CHECK(page.out.starts_with("rank 2 ("));
  CHECK(holds(page.out, fmt::format("pid {}) was killed in ", ranks.at(2))));
  CHECK(holds(page.out, "tessera train --nproc 3 " + run + "/config.json"));
  std::string logs;
  for (const int rank : {0, 1}) logs += dir.read(fmt::format("run/logs/rank-{}.log", rank));
  CHECK(holds(logs, "last collectives: rank"));

  // The report's command resumes on fewer ranks; the new report covers only the new start.
  run_to(0, {"train", "--nproc", "2", run + "/config.json", "--train.steps=200",
             "--train.global_batch=4"});
  const auto done = report();
  CHECK(done.at("state") == "done");
  CHECK(done.at("ranks").size() == 2);
  CHECK_FALSE(std::filesystem::exists(run + "/flight/rank-00002.bin"));
}

TEST_CASE_FIXTURE(Reported, "a stopped rank is named while the others still wait for it") {
  LongRun process(*this, 2);
  ::kill(process.ranks().at(1), SIGSTOP);
  wait_until([&] { return report().at("state") != "running"; });
  report("stopped", 1);
}

namespace {

// Ranks started by hand, with the same rendezvous address in every start.
struct ByHand : Reported {
  std::string meeting = "127.0.0.1:" + meeting_port();

  std::unique_ptr<CliProcess> start(int rank, int steps, const Arguments& more = {}) const {
    const auto words = joined(small_run(text, run, 1, steps),
                              {"--rank", std::to_string(rank), "--world-size", "2", "--local-rank",
                               std::to_string(rank), "--rdzv", meeting});
    return std::make_unique<CliProcess>(joined(words, more));
  }
  void train(int steps) const {
    const auto zero = start(0, steps), one = start(1, steps);
    end_of(*zero, 0);
    end_of(*one, 0);
  }
};

}  // namespace

TEST_CASE_FIXTURE(ByHand, "a rank that exits next to a stopped rank 0 leaves its record") {
  const auto zero = start(0, 100'000, {"--checkpoint.every=0"});
  const auto one = start(1, 100'000, {"--checkpoint.every=0"});
  REQUIRE(zero->wait_for("step      1/100000"));
  zero->signal(SIGSTOP);
  CHECK(holds(end_of(*one, 4).err, "culprit=rank 0 ("));
  report("stopped", 0);
  zero->signal(SIGKILL);
  zero->wait(std::chrono::seconds(10));
  const auto killed = report("killed", 0);
  CHECK(killed.at("ranks").at(1).at("end") == "peer lost");
  CHECK(holds(killed.at("ranks").at(1).at("text").get<std::string>(), "rank 0"));
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
  end_of(*zero, 4);
  const auto dead = report("killed", 1);
  const auto& missing = dead.at("ranks").at(1);
  CHECK_FALSE(missing.contains("end"));
  CHECK(holds(missing.at("problem").get<std::string>(), "no record of this start"));
}

TEST_CASE_FIXTURE(ByHand,
                  "a start that fails before the rendezvous does not count as a finished run") {
  train(2);
  for (const int there : {0, 1}) {
    end_of(*start(there, 4, {"--comm.init_timeout=2"}), 4);
    const auto failed = report("never started", 1 - there);
    CHECK(failed.at("ranks").at(there).at("end") == "timeout");
  }
  const auto waiting = start(0, 4);
  wait_until([&] { return report().at("state") == "running"; });
  waiting->signal(SIGKILL);
  waiting->wait(std::chrono::seconds(10));
  report("killed", 0);
  train(4);
  CHECK(report().at("state") == "done");
}

TEST_CASE_FIXTURE(Reported, "a refused job leaves the running job's records unchanged") {
  LongRun process(*this, 2);
  CHECK(holds(run_to(2, small_run(text, run, 2, 100'000)).err, "in use by another run"));
  const auto running = report();
  INFO(running.dump(2));
  CHECK(running.at("state") == "running");
  const auto ranks = process.ranks();
  for (const int rank : {0, 1}) CHECK(running.at("ranks").at(rank).at("pid") == ranks.at(rank));
}

TEST_CASE_FIXTURE(Reported, "in the records' directory, only files of earlier runs are removed") {
  namespace fs = std::filesystem;
  const auto train = [&](int steps) { run_to(0, small_run(text, run, 1, steps)); };
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

TEST_CASE_FIXTURE(Reported, "a path that is no run is an I/O error") {
  for (const std::string& path : {dir.file("absent"), dir.path().string()}) {
    CHECK(holds(run_to(3, {"run-report", path}).err, path + " is not a "));
  }
}
