// Non-finite steps, stop requests by signal, out of memory, and automatic restarts.

#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "tests/e2e/small_run.h"
#include "tests/support/meeting_port.h"

using namespace tessera;
using namespace tessera::test;
using std::chrono::milliseconds;

namespace {

constexpr int kFailed = 1, kUsage = 2, kComm = 4, kMemory = 5;

struct Wild : InMemory {
  // With this learning rate, weight decay makes the weights grow until gradients overflow after a
  // few steps; clipping keeps the moments finite, so that they can be saved.
  Arguments wild(const std::string& run, int world, int steps) const {
    return joined(small_run(text, dir.file(run), world, steps),
                  {"--optim.lr=1000", "--optim.warmup_steps=0", "--train.eval_every=0"});
  }
  std::vector<std::int64_t> skipped(const std::string& run) const {
    std::vector<std::int64_t> steps;
    std::ifstream in(dir.file(run) + "/metrics.jsonl");
    for (std::string line; std::getline(in, line);) {
      const auto json = nlohmann::json::parse(line);
      if (!json.value("skipped", false)) continue;
      steps.push_back(json.at("step").get<std::int64_t>());
      CHECK(json.at("grad_norm").is_null());
    }
    return steps;
  }
};

}  // namespace

TEST_CASE_FIXTURE(Wild, "a non-finite step stops the run, and all ranks report the same") {
  for (const int world : {1, 2, 3, 4}) {
    CAPTURE(world);
    const std::string run = fmt::format("stop-{}", world);
    const auto result = run_to(kFailed, joined(wild(run, world, 60), {"--train.global_batch=12"}));
    CHECK(count(result.err, ": the gradient of ln_f.") == world);
    CHECK(count(result.err, " is not finite on rank 0 (and ") == world);
    CHECK(count(result.err, "; nothing was updated") == world);
    CHECK(count(result.err, "Lower optim.lr") == world);
    CHECK(skipped(run).empty());
  }
}

TEST_CASE_FIXTURE(Wild, "a save of values that are not finite ends the run, and saves nothing") {
  for (const int world : {1, 2}) {
    CAPTURE(world);
    const std::string run = fmt::format("saved-{}", world);
    const auto result = run_to(
        kFailed, joined(wild(run, world, 200),
                        {"--optim.clip_norm=0", "--checkpoint.keep=1", "--checkpoint.every=1"}));
    CHECK(holds(result.err, "Lower optim.lr"));
    run_to(0, {"checkpoint", "verify", dir.file(run)});
  }
}

TEST_CASE_FIXTURE(Wild, "non-finite steps are skipped, at most ten in a row") {
  for (const int world : {2, 3, 4}) {
    CAPTURE(world);
    const auto name = [&](const std::string& what) { return fmt::format("{}-{}", what, world); };
    const auto go = [&](int code, const std::string& run, int steps) {
      return run_to(code, joined(wild(run, world, steps),
                                 {"--train.nonfinite=skip", "--train.global_batch=12"}));
    };
    const auto all = go(kFailed, name("skip"), 60);
    CHECK(holds(all.err, "(10 steps in a row were skipped before)"));
    CHECK(holds(all.err, "warning: skipped: step "));
    const auto steps = skipped(name("skip"));
    REQUIRE(steps.size() >= 10);
    const int first = static_cast<int>(steps.front());

    // Up to ten skips the run ends well, and can be resumed in between with the same result.
    const std::string whole = name("whole"), parts = name("parts");
    go(0, whole, first + 6);
    go(0, parts, first + 3);
    go(0, parts, first + 6);
    CHECK((read_metrics(dir.file(parts)).steps == read_metrics(dir.file(whole)).steps));
    CHECK(skipped(parts) == skipped(whole));
    CHECK(skipped(whole).size() >= 3);
    CHECK(inspect(dir.file(parts)).at("digest") == inspect(dir.file(whole)).at("digest"));
  }
}

TEST_CASE_FIXTURE(Wild,
                  "SIGUSR1 to one rank stops all ranks at the same step, with one checkpoint") {
  for (int i = 0; i < 6; ++i) {
    const int world = 2 + i / 2;
    const bool of_launcher = i % 2 == 1;
    CAPTURE(world);
    CAPTURE(of_launcher);
    const std::string run = dir.file(fmt::format("warned-{}", i));
    CliProcess process(joined(small_run(text, run, world, 1'000'000),
                              {"--checkpoint.every=1000000", "--train.global_batch=12"}));
    REQUIRE(process.wait_for("step       1/1000000"));
    const auto ranks = process.ranks();
    REQUIRE(ranks.size() == static_cast<std::size_t>(world));
    ::kill(of_launcher ? process.pid() : ranks.at(1), SIGUSR1);
    const auto result = end_of(process, 128 + SIGTERM);
    CHECK_FALSE(holds(result.err, "exited with code"));
    CHECK(count(result.err, ": saved ") == 1);
    std::set<std::string> ends;
    for (int rank = 0; rank < world; ++rank) {
      const std::string log = dir.read(fmt::format("{}/logs/rank-{}.log", run, rank));
      const auto at = log.rfind("end at step ");
      REQUIRE(at != std::string::npos);
      ends.insert(log.substr(at));
    }
    CHECK(ends.size() == 1);
  }
}

TEST_CASE_FIXTURE(Wild, "a run whose log pipe is full continues, stops on one signal, and saves") {
  for (const int world : {1, 3}) {
    CAPTURE(world);
    const std::string run = dir.file(fmt::format("unread-{}", world));
    // All ranks and the launcher write to one small pipe, which stays full.
    const std::string fifo = dir.file(fmt::format("log-{}", world));
    REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
    const int reader = ::open(fifo.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    REQUIRE(::fcntl(reader, F_SETPIPE_SZ, 4096) >= 0);
    CliProcess process(joined(small_run(text, run, world, 1'000'000),
                              {"--train.global_batch=12", "--checkpoint.every=1000000",
                               "--train.eval_every=0", "--comm.timeout=5", "--train.log_every=1"}),
                       {}, fifo);
    // Each step logs a line: many times the pipe's capacity.
    CHECK(wait_until([&] { return count(dir.read(run + "/metrics.jsonl"), "\n") >= 400; }));
    process.signal(SIGTERM);
    end_of(process, 128 + SIGTERM);
    run_to(0, {"checkpoint", "verify", run});
    ::close(reader);
  }
}

TEST_CASE_FIXTURE(Wild, "out of memory on one rank ends all within 3 s, and all name it") {
  int started = 0;
  for (const int world : {2, 3, 4}) {
    // While allocating weights and moments, and in the first step.
    for (const std::string limit : {"100000", "400000"}) {
      for (const int victim : {0, world - 1}) {
        CAPTURE(world);
        CAPTURE(limit);
        CAPTURE(victim);
        const std::string run = dir.file(fmt::format("memory-{}", started++));
        const std::string port = meeting_port();
        std::vector<std::unique_ptr<CliProcess>> ranks;
        for (int rank = 0; rank < world; ++rank) {
          Variables variables = rank_variables(rank, world, port);
          if (rank == victim) variables["TESSERA_TRAIN_MEMORY_LIMIT"] = limit;
          ranks.push_back(std::make_unique<CliProcess>(
              joined(small_run(text, run, 1, 100'000),
                     {fmt::format("--train.global_batch={}", 2 * world)}),
              variables));
        }
        ranks[static_cast<std::size_t>(victim)]->wait_for("exhausted");
        const auto failed_at = std::chrono::steady_clock::now();
        for (int rank = 0; rank < world; ++rank) {
          const auto result = ranks[static_cast<std::size_t>(rank)]->wait(std::chrono::seconds(20));
          CAPTURE(rank);
          CHECK(std::chrono::steady_clock::now() - failed_at < milliseconds(3000));
          CHECK(result.code == (rank == victim ? kMemory : kComm));
          if (rank == victim) {
            CHECK(holds(result.err, "host memory is exhausted: "));
            CHECK(holds(result.err, " of a limit of "));
            CHECK(holds(result.err, "category "));  // the ledger
          } else {
            CHECK(holds(result.err, fmt::format("rank {} ", victim)));
            CHECK(holds(result.err, "out of memory: host memory is exhausted: "));
          }
        }
      }
    }
  }
}

TEST_CASE_FIXTURE(Wild, "a run whose rank is killed once restarts by itself, bit for bit") {
  constexpr int kSteps = 1500;
  const auto start = [&](const std::string& run) {
    return joined(small_run(text, dir.file(run), 2, kSteps), {"--checkpoint.every=100"});
  };
  run_to(0, start("alone"));
  CliProcess process(joined(start("killed"), {"--restarts", "3", "--checkpoint.resume=never"}));
  REQUIRE(process.wait_for("saved"));
  const auto ranks = process.ranks();
  REQUIRE(ranks.size() == 2);
  ::kill(ranks.at(1), SIGKILL);
  const auto result = end_of(process, 0);
  CHECK(holds(result.err, "restart 1 of 3: rank 1 was killed by SIGKILL; resuming from step "));
  CHECK_FALSE(holds(result.err, "restart 2 of 3"));
  CHECK((read_metrics(dir.file("killed")) == read_metrics(dir.file("alone"))));
  CHECK(inspect(dir.file("killed")).at("digest") == inspect(dir.file("alone")).at("digest"));
  for (const char* log : {"killed/logs/rank-0.log", "killed/logs/rank-1.log"})
    CHECK(count(dir.read(log), "start at step") == 2);
}

TEST_CASE_FIXTURE(Wild, "errors that a restart cannot fix, and stopped runs, are not restarted") {
  const auto unusable = run_to(kUsage, joined(small_run(text, dir.file("usage"), 2, 10),
                                              {"--restarts=3", "--model.n_head=5"}));
  CHECK_FALSE(holds(unusable.err, "tessera: restart "));
  const auto failed = run_to(kFailed, joined(wild("wild", 2, 100), {"--restarts=3"}));
  CHECK(count(failed.err, "tessera: restart ") == 1);
  CHECK(
      holds(run_to(kUsage, joined(small_run(text, dir.file("alone"), 1, 10), {"--restarts=3"})).err,
            "--nproc"));

  CliProcess process(joined(small_run(text, dir.file("stopped"), 2, 1'000'000),
                            {"--checkpoint.every=20", "--restarts=3"}));
  REQUIRE(process.wait_for("saved"));
  ::kill(process.ranks().at(1), SIGKILL);
  REQUIRE(process.wait_for("restart 1 of 3"));
  process.signal(SIGTERM);
  CHECK_FALSE(holds(end_of(process, 128 + SIGTERM).err, "restart 2 of 3"));
}

TEST_CASE_FIXTURE(Wild, "a SIGUSR1 before the first step takes effect after it") {
  CliProcess process(joined(small_run(text, dir.file("early"), 2, 100'000),
                            {"--checkpoint.every=1000", "--train.eval_every=0"}));
  REQUIRE(wait_until([&] { return process.ranks().size() == 2; }));
  process.signal(SIGUSR1);
  CHECK(holds(end_of(process, 128 + SIGTERM).err, "stopped"));
  run_to(0, {"checkpoint", "verify", dir.file("early")});
}

TEST_CASE_FIXTURE(Wild, "a stop request during the start does not count as a failure") {
  for (int i = 0; i < 24; ++i) {
    const int world = 2 + i % 2;
    const int number = i % 3 == 0 ? SIGINT : SIGTERM;
    CAPTURE(world);
    CAPTURE(i);
    const std::string run = dir.file(fmt::format("asked-{}", i));
    CliProcess process(joined(small_run(text, run, world, 1'000'000),
                              {"--train.global_batch=12", "--train.eval_every=0", "--json"}));
    if (i < 12) {
      // Until exec the child is a copy of this test.
      const auto program = [](const std::string& pid) {
        return std::filesystem::read_symlink("/proc/" + pid + "/exe");
      };
      wait_until([&] { return program(std::to_string(process.pid())) != program("self"); });
      std::this_thread::sleep_for(milliseconds(8 * i));
    } else {  // the first rank has completed the rendezvous, others may not have
      const auto met = [](const auto& rank) { return catches(rank.second, SIGTERM); };
      wait_until([&] { return std::ranges::any_of(process.ranks(), met); });
    }
    const auto ranks = process.ranks();
    if (i % 4 == 3 && ranks.contains(1)) {
      ::kill(ranks.at(1), number);
    } else {
      process.signal(number);
    }
    const auto result = process.wait(std::chrono::seconds(30));
    // Before the launcher has installed its handlers, no rank exists.
    if (result.signal == number && result.err.empty()) continue;
    CHECK(result.code == 128 + number);
    CHECK_FALSE(holds(result.err, "culprit"));
    CHECK_FALSE(holds(result.err, "lost rank"));
    if (holds(result.err, "before the first step"))
      CHECK(nlohmann::json::parse(result.out).at("stopped_by_signal") == number);
    if (std::filesystem::exists(run + "/checkpoints")) run_to(0, {"checkpoint", "verify", run});
  }
}

TEST_CASE_FIXTURE(Wild, "a restart does not resume a run with checkpoint.resume=never") {
  run_to(0, small_run(text, dir.file("old"), 1, 4));
  const auto before = read_metrics(dir.file("old"));
  const auto result = run_to(kUsage, joined(small_run(text, dir.file("old"), 2, 8),
                                            {"--restarts=2", "--checkpoint.resume=never"}));
  CHECK(holds(result.err, "continue it with --checkpoint.resume auto"));
  CHECK_FALSE(holds(result.err, "rank 1"));
  CHECK((read_metrics(dir.file("old")) == before));
}
