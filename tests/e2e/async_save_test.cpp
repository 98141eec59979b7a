// Asynchronous saves: the same results as with synchronous ones, despite signals, kills and write
// errors.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "tests/e2e/small_run.h"

using namespace tessera;
using test::Arguments;
using test::CliProcess;
using test::count;
using test::holds;
using test::joined;
using test::run_cli;
using test::small_run;

namespace fs = std::filesystem;

namespace {

using std::chrono::milliseconds;

std::string digest(const fs::path& run) {
  const auto result = run_cli({"checkpoint", "inspect", run, "--json"});
  INFO(result.describe());
  REQUIRE(result.code == 0);
  return nlohmann::json::parse(result.out).at("digest");
}

std::vector<std::int64_t> steps_of(const fs::path& run) {
  std::set<std::int64_t> steps;
  for (const auto& item : fs::directory_iterator(run / "checkpoints")) {
    const std::string name = item.path().filename();
    if (name.starts_with("step-") && !name.ends_with(".tmp"))
      steps.insert(std::stoll(name.substr(5)));
  }
  return {steps.begin(), steps.end()};
}

std::vector<nlohmann::json> saves_of(const fs::path& run) {
  std::ifstream in(run / "saves.jsonl");
  std::vector<nlohmann::json> saves;
  for (std::string text; std::getline(in, text);) saves.push_back(nlohmann::json::parse(text));
  return saves;
}

// File size limit that stands for a full disk: shards exceed it, metrics and logs do not.
constexpr rlim_t kSmallFiles = 64 << 10;

void limit_files(pid_t pid, rlim_t bytes) {
  rlimit limit{};
  REQUIRE(::prlimit(pid, RLIMIT_FSIZE, nullptr, &limit) == 0);
  limit.rlim_cur = std::min(bytes, limit.rlim_max);
  REQUIRE(::prlimit(pid, RLIMIT_FSIZE, &limit, nullptr) == 0);
}

struct Fixture {
  test::TempDir dir;
  std::string text = dir.write("text.txt", test::make_text(3000));

  std::string run(const Arguments& arguments) const {
    const auto result = run_cli(arguments);
    INFO(result.describe());
    REQUIRE(result.code == 0);
    return result.err;
  }
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "asynchronous and synchronous saves give the same runs") {
  for (const int world : {1, 2}) {
    CAPTURE(world);
    const auto command = [&](const std::string& out, int steps, const std::string& async) {
      return joined(small_run(text, out, world, steps),
                    {"--checkpoint.every=3", "--checkpoint.keep=0", "--checkpoint.async=" + async});
    };
    const std::string on = dir.file(fmt::format("on-{}", world));
    const std::string off = dir.file(fmt::format("off-{}", world));
    const std::string said_on = run(command(on, 30, "on"));
    const std::string said_off = run(command(off, 30, "off"));
    CHECK((test::read_metrics(on) == test::read_metrics(off)));
    CHECK(digest(on) == digest(off));
    CHECK(steps_of(on) == steps_of(off));
    // The ledger lists the staging copy, at the start and at the end.
    CHECK(count(said_on, "staging") == 2);
    CHECK(count(said_off, "staging") == 0);
    for (const auto& [out, said] : {std::pair(on, said_on), std::pair(off, said_off)}) {
      const auto saves = saves_of(out);
      CHECK(saves.size() == 10);
      CHECK(count(said, ": saved " + out) == 10);
      CHECK(count(said, "stalled training for") == 10);
      for (const auto& save : saves) {
        CHECK(save.at("step").get<int>() % 3 == 0);
        CHECK(save.at("bytes") > 12 * 30'000);
        CHECK(save.at("seconds") > 0.0);
        CHECK(save.at("gb_per_s") > 0.0);
        CHECK(save.at("stall_ms") > 0.0);
      }
    }
    for (const int step : {3, 15, 27}) {
      CAPTURE(step);
      const std::string again = dir.file(fmt::format("again-{}-{}", world, step));
      const auto from = fs::path(on) / "checkpoints" / fmt::format("step-{:08}", step);
      run(joined(command(again, 30, "on"), {"--checkpoint.resume=" + from.string()}));
      CHECK(digest(again) == digest(on));
    }
  }
}

TEST_CASE_FIXTURE(Fixture,
                  "SIGTERM during an asynchronous save ends the run with its last step saved") {
  for (const int world : {1, 2, 3, 4}) {
    CAPTURE(world);
    const auto command = [&](const std::string& out) {
      return joined(small_run(text, out, world, 120),
                    {"--checkpoint.every=2", "--train.global_batch=12"});
    };
    const std::string calm = dir.file(fmt::format("calm-{}", world));
    run(command(calm));
    const std::string stopped = dir.file(fmt::format("stopped-{}", world));
    CliProcess process(command(stopped));
    REQUIRE(process.wait_for(": saved ", 3));
    process.signal(SIGTERM);
    const auto result = process.wait(std::chrono::seconds(10));
    INFO(result.describe());
    CHECK(result.code == 143);
    CHECK(static_cast<std::size_t>(steps_of(stopped).back()) ==
          test::read_metrics(stopped).steps.size());
    run(command(stopped));
    CHECK((test::read_metrics(stopped) == test::read_metrics(calm)));
    CHECK(digest(stopped) == digest(calm));
  }
}

TEST_CASE_FIXTURE(Fixture, "a rank that cannot write is named, and training goes on until it can") {
  const std::string out = dir.file("run");
  CliProcess process(
      joined(small_run(text, out, 2, 100'000), {"--checkpoint.every=5", "--checkpoint.keep=2"}));
  REQUIRE(process.wait_for(": saved ", 2));
  const pid_t rank = process.ranks().at(1);
  limit_files(rank, kSmallFiles);
  REQUIRE(process.wait_for("was not saved, training continues: ", 2));
  const auto kept = steps_of(out);
  CHECK(kept.size() == 2);
  CHECK(run_cli({"checkpoint", "verify", out}).code == 0);
  limit_files(rank, RLIM_INFINITY);
  const int saves = count(process.err(), ": saved ");
  REQUIRE(process.wait_for(": saved ", saves + 2));
  process.signal(SIGTERM);
  const auto result = process.wait(std::chrono::seconds(10));
  INFO(result.describe());
  CHECK(result.code == 143);
  CHECK(holds(result.err, "was not saved: rank 1: cannot write " + out));
  CHECK(holds(result.err, "rank-00001-of-00002.safetensors: File too large"));
  CHECK(holds(result.err, "former checkpoints are unchanged"));
  CHECK(steps_of(out).back() > kept.back());
  CHECK(run_cli({"checkpoint", "verify", out}).code == 0);
  for (const auto& item : fs::directory_iterator(fs::path(out) / "checkpoints")) {
    CHECK(item.path().extension() != ".tmp");
  }
}

TEST_CASE_FIXTURE(Fixture, "after a failed save a run continues or stops, as configured") {
  for (const int world : {1, 2, 3, 4}) {
    for (const std::string policy : {"warn", "stop"}) {
      if (policy == "warn" && world > 2) continue;
      const std::string async = world == 1 ? "off" : "on";
      const auto command = [&](const std::string& out, int steps) {
        return joined(small_run(text, out, world, steps),
                      {world == 3 ? "--train.global_batch=3" : "--train.global_batch=4"});
      };
      CAPTURE(world);
      CAPTURE(policy);
      const std::string out = dir.file(fmt::format("{}-{}-{}", async, policy, world));
      run(command(out, 4));
      const std::string before = digest(out);
      limit_files(0, kSmallFiles);
      const auto result =
          run_cli(joined(command(out, 100), {"--checkpoint.every=20", "--checkpoint.async=" + async,
                                             "--checkpoint.on_error=" + policy}));
      limit_files(0, RLIM_INFINITY);
      INFO(result.describe());
      // The exit code is an error either way: the last step could not be saved.
      CHECK(result.code == 3);
      CHECK(holds(result.err, "tessera: error: checkpoint " + out));
      CHECK(holds(result.err, "rank-00000-of"));
      CHECK(holds(result.err, "File too large"));
      const auto steps = test::read_metrics(out).steps.size();
      if (policy == "warn") {
        CHECK(steps == 100);
        CHECK(count(result.err, "was not saved, training continues") >= 4);
      } else {
        CHECK(steps >= 21);
        CHECK(steps < 100);
        CHECK(holds(result.err, "step 20 was not saved, training ends (checkpoint.on_error is"));
      }
      CHECK(holds(result.err, "tokens/s with evaluations and saves"));  // an orderly end
      CHECK(digest(out) == before);
      run(command(out, 6));
    }
  }
}

TEST_CASE_FIXTURE(Fixture,
                  "the newest, every n-th and the best checkpoints are kept, across resumes too") {
  const std::string out = dir.file("run");
  const auto command = [&](int steps) {
    return joined(
        small_run(text, out, 2, steps),
        {"--train.eval_every=0", "--optim.lr=0.05", "--checkpoint.every=4", "--checkpoint.keep=2",
         "--checkpoint.keep_every=24", "--checkpoint.keep_best=2"});
  };
  run(command(28));
  run(command(64));
  const auto losses = test::read_metrics(out).val_loss;
  std::vector<std::pair<double, std::int64_t>> order;
  for (const auto& [step, loss] : losses) order.emplace_back(std::stod(loss), -step);
  CHECK(order.size() == 16);
  std::sort(order.begin(), order.end());
  std::set<std::int64_t> expected{24, 48, 60, 64};
  for (int i = 0; i < 2; ++i) expected.insert(-order[static_cast<std::size_t>(i)].second);
  CHECK(steps_of(out) == std::vector<std::int64_t>(expected.begin(), expected.end()));

  const auto refused = run_cli(joined(small_run(text, dir.file("none"), 1, 10),
                                      {"--data.val_fraction=0", "--checkpoint.keep_best=1"}));
  INFO(refused.describe());
  CHECK(refused.code == 2);
  CHECK(holds(refused.err, "checkpoint.keep_best is 1, but there is no validation data"));
}
