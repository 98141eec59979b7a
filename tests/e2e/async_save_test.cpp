// Asynchronous saves: the same results as with synchronous ones, despite signals, kills and write
// errors.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <set>

#include "io/checkpoint/find.h"
#include "tests/e2e/small_run.h"

using namespace tessera;
using namespace tessera::test;

namespace fs = std::filesystem;

namespace {

std::set<std::int64_t> steps_of(const fs::path& run) {
  std::set<std::int64_t> steps;
  for (const auto& entry : io::find_checkpoints(run)) steps.insert(entry.step);
  return steps;
}

std::vector<nlohmann::json> saves_of(const fs::path& run) {
  std::ifstream in(run / "saves.jsonl");
  std::vector<nlohmann::json> saves;
  for (std::string text; std::getline(in, text);) saves.push_back(nlohmann::json::parse(text));
  return saves;
}

constexpr rlim_t kSmallFiles = 64 << 10;  // shards exceed it, metrics and logs do not

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
    const std::string said_on = run_to(0, command(on, 30, "on")).err;
    const std::string said_off = run_to(0, command(off, 30, "off")).err;
    CHECK((read_metrics(on) == read_metrics(off)));
    CHECK(inspect(on).at("digest") == inspect(off).at("digest"));
    CHECK((steps_of(on) == steps_of(off)));
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
      run_to(0, joined(command(again, 30, "on"), {"--checkpoint.resume=" + from.string()}));
      CHECK(inspect(again).at("digest") == inspect(on).at("digest"));
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
    run_to(0, command(calm));
    const std::string stopped = dir.file(fmt::format("stopped-{}", world));
    CliProcess process(command(stopped));
    REQUIRE(process.wait_for(": saved ", 3));
    process.signal(SIGTERM);
    end_of(process, 143);
    CHECK(static_cast<std::size_t>(*steps_of(stopped).rbegin()) ==
          read_metrics(stopped).steps.size());
    run_to(0, command(stopped));
    CHECK((read_metrics(stopped) == read_metrics(calm)));
    CHECK(inspect(stopped).at("digest") == inspect(calm).at("digest"));
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
  run_to(0, {"checkpoint", "verify", out});
  limit_files(rank, RLIM_INFINITY);
  const int saves = count(process.err(), ": saved ");
  REQUIRE(process.wait_for(": saved ", saves + 2));
  process.signal(SIGTERM);
  const auto result = end_of(process, 143);
  CHECK(holds(result.err, "was not saved: rank 1: cannot write " + out));
  CHECK(holds(result.err, "rank-00001-of-00002.safetensors: File too large"));
  CHECK(holds(result.err, "former checkpoints are unchanged"));
  CHECK(*steps_of(out).rbegin() > *kept.rbegin());
  run_to(0, {"checkpoint", "verify", out});
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
      run_to(0, command(out, 4));
      const std::string before = inspect(out).at("digest");
      limit_files(0, kSmallFiles);
      const auto result =
          run_cli(joined(command(out, 100), {"--checkpoint.every=20", "--checkpoint.async=" + async,
                                             "--checkpoint.on_error=" + policy}));
      limit_files(0, RLIM_INFINITY);
      // The exit code is an error either way: the last step could not be saved.
      CHECK(result.code == 3);
      CHECK(holds(result.err, "tessera: error: checkpoint " + out));
      CHECK(holds(result.err, "rank-00000-of"));
      CHECK(holds(result.err, "File too large"));
      const auto steps = read_metrics(out).steps.size();
      if (policy == "warn") {
        CHECK(steps == 100);
        CHECK(count(result.err, "was not saved, training continues") >= 4);
      } else {
        CHECK(steps >= 21);
        CHECK(steps < 100);
        CHECK(holds(result.err, "step 20 was not saved, training ends (checkpoint.on_error is"));
      }
      CHECK(holds(result.err, "tokens/s with evaluations and saves"));  // an orderly end
      CHECK(inspect(out).at("digest") == before);
      run_to(0, command(out, 6));
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
  run_to(0, command(28));
  run_to(0, command(64));
  const auto losses = read_metrics(out).val_loss;
  std::set<std::pair<double, std::int64_t>> order;
  for (const auto& [step, loss] : losses) order.emplace(std::stod(loss), -step);
  CHECK(order.size() == 16);
  std::set<std::int64_t> expected{24, 48, 60, 64};
  for (auto best = order.begin(); best != std::next(order.begin(), 2); ++best)
    expected.insert(-best->second);
  CHECK((steps_of(out) == expected));

  const auto refused = run_to(2, joined(small_run(text, dir.file("none"), 1, 10),
                                        {"--data.val_fraction=0", "--checkpoint.keep_best=1"}));
  CHECK(holds(refused.err, "checkpoint.keep_best is 1, but there is no validation data"));
}
