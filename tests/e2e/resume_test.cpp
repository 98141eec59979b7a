// Runs that are killed, stopped, or moved to other world sizes give the same results when resumed.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/e2e/small_run.h"

using namespace tessera;
using namespace tessera::test;

namespace fs = std::filesystem;

namespace {

using std::chrono::milliseconds;

// Step of the last complete line in metrics.jsonl; -1 if there is none.
std::int64_t last_step(const fs::path& run) {
  std::ifstream in(run / "metrics.jsonl");
  std::int64_t last = -1;
  for (std::string text; std::getline(in, text);) {
    const auto line = nlohmann::json::parse(text, nullptr, false);
    if (line.is_object()) last = line.value("step", last);
  }
  return last;
}

void wait_for_step(const fs::path& run, std::int64_t step) {
  REQUIRE(wait_until([&] { return last_step(run) >= step; }));
}

void check_same(const fs::path& run, const fs::path& expected) {
  CHECK((read_metrics(run) == read_metrics(expected)));
  CHECK(inspect(run).at("step") == inspect(expected).at("step"));
  CHECK(inspect(run).at("digest") == inspect(expected).at("digest"));
}

struct Setting {
  std::string mode;
  int world = 1;
};

// A run of `steps` steps that is killed under each setting in turn, and ends under the last one.
Metrics killed_run(const Fixture& fixture, const std::vector<Setting>& settings, int steps,
                   const Arguments& more = {}) {
  const std::string run = fixture.dir.file("killed");
  for (std::size_t i = 0; i < settings.size(); ++i) {
    const std::string& mode = settings[i].mode;
    const int world = settings[i].world;
    const bool is_last = i + 1 == settings.size();
    CAPTURE(mode);
    const auto command =
        joined(joined(small_run(fixture.text, run, world, is_last ? steps : 100'000),
                      {"--train.global_batch=12", "--checkpoint.every=2", "--shard.mode=" + mode}),
               joined(mode == "hybrid" ? Arguments{"--shard.group=2"} : Arguments{}, more));
    const std::int64_t before = last_step(run);
    if (is_last) {
      REQUIRE(before + 4 < steps);
      CHECK(holds(run_to(0, command).err, ", from " + run + "/checkpoints/step-"));
    } else {
      CliProcess process(command);
      wait_for_step(run, std::max<std::int64_t>(before, 0) + 6);
      process.signal_group(SIGKILL);
      REQUIRE(process.wait(std::chrono::seconds(10)).signal == SIGKILL);
    }
  }
  CHECK(inspect(run).at("world_size") == settings.back().world);
  return read_metrics(run);
}

}  // namespace

TEST_CASE_FIXTURE(Fixture,
                  "a run killed under one sharding mode resumes under another, at any size") {
  const Metrics killed = killed_run(
      *this, {{"full", 2}, {"optimizer", 3}, {"hybrid", 4}, {"none", 1}, {"gradients", 2}}, 60);
  const std::string calm = dir.file("calm");
  run_to(0, joined(small_run(text, calm, 2, 60), {"--train.global_batch=12"}));
  const Metrics expected = read_metrics(calm);
  REQUIRE(killed.steps.size() == 60);
  for (std::size_t i = 0; i < 60; ++i) {
    CAPTURE(i);
    // Other world sizes add in another order.
    CHECK(relative(killed.steps[i].loss, expected.steps[i].loss) < 1e-5);
  }
}

TEST_CASE_FIXTURE(Fixture, "at one world size, sharding modes continue each other bit for bit") {
  for (const std::string optimizer : {"adamw", "muon"}) {
    CAPTURE(optimizer);
    // Clipping is off, because the norm's sum of squares depends on the segments.
    const Arguments more = {"--optim.clip_norm=0", "--optim.name=" + optimizer};
    const Metrics killed = killed_run(
        *this, {{"none", 2}, {"gradients", 2}, {"full", 2}, {"optimizer", 2}, {"full", 2}}, 60,
        more);
    const std::string calm = dir.file("calm");
    run_to(0, joined(joined(small_run(text, calm, 2, 60), {"--train.global_batch=12"}), more));
    const Metrics expected = read_metrics(calm);
    REQUIRE(killed.steps.size() == 60);
    for (std::size_t i = 0; i < 60; ++i) CHECK(killed.steps[i].loss == expected.steps[i].loss);
    CHECK(inspect(dir.file("killed")).at("digest") == inspect(calm).at("digest"));
    fs::remove_all(dir.file("killed"));
    fs::remove_all(calm);
  }
}

TEST_CASE_FIXTURE(Fixture, "runs killed at random moments end like undisturbed ones") {
  constexpr int kKills = 4;
  constexpr int kSteps = 100;
  std::mt19937 random(20240501);
  for (const std::string optimizer : {"adamw", "muon", "adamw8bit"}) {
    CAPTURE(optimizer);
    const std::string calm = dir.file("calm-" + optimizer);
    const std::string killed = dir.file("killed-" + optimizer);
    const auto command = [&](const std::string& run, int world = 2) {
      return joined(small_run(text, run, world, kSteps),
                    {"--checkpoint.every=4", "--checkpoint.keep_every=48", "--optim.ema=0.9",
                     "--optim.name=" + optimizer});
    };
    run_to(0, command(calm));
    for (int kill = 1; kill <= kKills; ++kill) {
      CAPTURE(kill);
      CliProcess process(command(killed));
      // Killed in a step, a save or an evaluation, with enough steps left for a fast machine; every
      // fourth time during the start.
      if (kill % 4 != 0) wait_for_step(killed, kill * 11 - random() % 5);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
      process.signal_group(SIGKILL);
      REQUIRE(process.wait(std::chrono::seconds(10)).signal == SIGKILL);
    }
    const auto resumed = run_to(0, command(killed));
    CHECK(holds(resumed.err, ", from " + killed + "/checkpoints/step-"));
    check_same(killed, calm);
    run_to(0, {"checkpoint", "diff", killed, calm, "--what", "all"});
    run_to(0, {"checkpoint", "verify", killed});
    // Remains of killed saves are removed.
    for (const auto& entry : fs::directory_iterator(fs::path(killed) / "checkpoints")) {
      CHECK(entry.path().extension() != ".tmp");
    }
    const Metrics expected = read_metrics(calm);
    for (const int world : {1, 4}) {
      CAPTURE(world);
      const std::string moved = dir.file(fmt::format("moved-{}-{}", optimizer, world));
      fs::copy(calm, moved, fs::copy_options::recursive);
      for (const int later : {92, 96, 100})
        fs::remove_all(fs::path(moved) / fmt::format("checkpoints/step-{:08}", later));
      CHECK(holds(run_to(0, command(moved, world)).err, "step 48 of 100, from"));
      const Metrics metrics = read_metrics(moved);
      REQUIRE(metrics.steps.size() == kSteps);
      // Other world sizes add in another order, and codes of moments round to another one of two.
      double most = 0;
      for (std::size_t i = 0; i < kSteps; ++i)
        most = std::max(most, relative(metrics.steps[i].loss, expected.steps[i].loss));
      MESSAGE(
          fmt::format("{} from 2 to {} ranks: losses differ by {:.1e}", optimizer, world, most));
      CHECK(most < (optimizer == "adamw8bit" ? 1e-3 : 1e-5));
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "bf16 master weights are stored as bf16, and resume bit for bit") {
  const std::string whole = dir.file("whole"), half = dir.file("half");
  const auto command = [&](const std::string& out, int steps) {
    return joined(small_run(text, out, 2, steps), {"--train.precision=bf16-true"});
  };
  run_to(0, command(whole, 20));
  run_to(0, command(half, 10));
  run_to(0, command(half, 20));
  CHECK((read_metrics(half).steps == read_metrics(whole).steps));
  CHECK(inspect(half).at("digest") == inspect(whole).at("digest"));
  const auto inspected = inspect(half);
  for (const auto& tensor : inspected.at("tensors"))
    CHECK(tensor.at("dtype") == (tensor.at("section") == "model" ? "BF16" : "F32"));
  run_to(0, joined(small_run(text, half, 1, 22), {"--train.precision=fp32"}));
  run_to(0, command(half, 24));
}

TEST_CASE_FIXTURE(Fixture, "dropout, the schedule and the data resume bit for bit") {
  for (const int world : {1, 3}) {
    CAPTURE(world);
    const auto command = [&](const std::string& out, const std::string& stop_after) {
      return joined(
          small_run(text, out, world, 30),
          {"--train.global_batch=12", "--model.dropout=0.2", "--optim.schedule=cosine",
           "--checkpoint.every=" + stop_after, "--checkpoint.keep=0", "--optim.name=adamw8bit"});
    };
    const std::string whole = dir.file(fmt::format("dropped-{}", world));
    run_to(0, command(whole, "7"));
    const std::string half = dir.file(fmt::format("dropped-half-{}", world));
    fs::copy(whole, half, fs::copy_options::recursive);
    for (const char* step : {"step-00000021", "step-00000028", "step-00000030"})
      fs::remove_all(fs::path(half) / "checkpoints" / step);
    CHECK(holds(run_to(0, command(half, "7")).err, "step 14 of 30, from"));
    check_same(half, whole);
  }
}

TEST_CASE_FIXTURE(Fixture, "a run saved by two, three or four ranks resumes on one to four") {
  const auto command = [&](const std::string& out, int world, int steps) {
    return joined(small_run(text, out, world, steps), {"--train.global_batch=12"});
  };
  for (const int saved : {2, 3, 4}) {
    CAPTURE(saved);
    const std::string whole = dir.file(fmt::format("whole-{}", saved));
    const std::string half = dir.file(fmt::format("half-{}", saved));
    run_to(0, command(whole, saved, 16));
    run_to(0, command(half, saved, 8));
    const auto expected = read_metrics(whole);
    for (const int world : {1, 2, 3, 4}) {
      CAPTURE(world);
      const std::string moved = dir.file(fmt::format("moved-{}-{}", saved, world));
      fs::copy(half, moved, fs::copy_options::recursive);
      run_to(0, command(moved, world, 16));
      const auto metrics = read_metrics(moved);
      REQUIRE(metrics.steps.size() == expected.steps.size());
      for (std::size_t i = 0; i < metrics.steps.size(); ++i) {
        CAPTURE(i);
        CHECK(relative(metrics.steps[i].loss, expected.steps[i].loss) < 1e-5);
        if (i < 8 || world == saved) CHECK((metrics.steps[i] == expected.steps[i]));
      }
      CHECK(inspect(moved).at("world_size") == world);
    }
  }
}

TEST_CASE_FIXTURE(Fixture,
                  "SIGTERM ends a run after a step with a checkpoint, and nothing is lost") {
  const auto command = [&](const std::string& run, int world) {
    // A single rank is fast and needs more steps to be running when the signal arrives. Every step
    // ends with an evaluation, which the resumed run must make up for.
    return joined(small_run(text, run, world, world == 1 ? 600 : 300),
                  {"--checkpoint.every=1000", "--train.eval_every=1", "--train.eval_batches=1",
                   world == 3 ? "--train.global_batch=3" : "--train.global_batch=4"});
  };
  for (const int world : {1, 2, 3, 4}) {
    const std::string calm = dir.file(fmt::format("calm-{}", world));
    run_to(0, command(calm, world));
    // Schedulers signal the program; timeout(1) and others the program, then its group. A
    // preemption may reach a single rank.
    for (const std::string whom : {"program", "group", "both", "rank"}) {
      if (world == 1 && whom != "program") continue;
      if (world > 2 && whom != "rank") continue;
      CAPTURE(world);
      CAPTURE(whom);
      const std::string stopped = dir.file(fmt::format("stopped-{}-{}", world, whom));
      CliProcess process(command(stopped, world));
      wait_for_step(stopped, 15);
      if (whom == "program" || whom == "both") process.signal(SIGTERM);
      if (whom == "group" || whom == "both") process.signal_group(SIGTERM);
      if (whom == "rank") ::kill(process.ranks().at(1), SIGTERM);
      CHECK(holds(end_of(process, 143).err, "by signal 15 after step"));
      const auto step = inspect(stopped).at("step").get<std::size_t>();
      CHECK(step >= 16);
      CHECK(step == read_metrics(stopped).steps.size());
      run_to(0, command(stopped, world));
      check_same(stopped, calm);
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "a SIGTERM ends an evaluation of minutes, and the run is saved") {
  const std::string much = dir.write("val.txt", std::string(30'000'000, 'a'));
  const std::string run = dir.file("run");
  CliProcess process(
      joined(small_run(text, run, 2, 1), {"--data.val=" + much, "--train.eval_batches=0"}));
  wait_for_step(run, 0);
  process.signal(SIGTERM);
  CHECK(holds(end_of(process, 143).err, "step 1: saved"));
  CHECK(read_metrics(run).val_loss.empty());
}

TEST_CASE_FIXTURE(Fixture,
                  "a SIGINT is answered once for all ranks, and a later one ends the run at once") {
  // Steps of minutes: a clean stop would have to wait.
  CliProcess process(joined(small_run(text, dir.file("run"), 2, 50),
                            {"--train.global_batch=400000", "--train.micro_batch=4"}));
  REQUIRE(wait_until([&] { return holds(dir.read("run/logs/rank-0.log"), "start at step 0"); }));
  process.signal(SIGINT);
  const std::string answer = "press Ctrl-C again to quit without saving";
  REQUIRE(wait_until([&] { return holds(process.err(), answer); }));
  std::this_thread::sleep_for(milliseconds(1100));  // earlier ones count as the same request
  REQUIRE(process.running());
  process.signal(SIGINT);
  const auto result = process.wait(std::chrono::seconds(5));
  CHECK(result.in_time);
  CHECK(result.code == 128 + SIGINT);
  CHECK(result.err.find(answer) == result.err.rfind(answer));
  CHECK(holds(result.err, "no step is lost"));
}

TEST_CASE_FIXTURE(Fixture, "a run directory belongs to one run, and to one job at a time") {
  const std::string used = dir.file("used");
  run_to(0, small_run(text, used, 1, 10));
  const auto refused =
      run_to(2, joined(small_run(text, used, 1, 20), {"--checkpoint.resume=never"}));
  CHECK(holds(refused.err, used + " holds a run with checkpoints up to step 10"));
  CHECK(read_metrics(used).steps.size() == 10);

  const auto metrics = read_metrics(used);
  CHECK(holds(run_to(0, small_run(text, used, 1, 10)).err, "raise --train.steps to continue"));
  CHECK((read_metrics(used) == metrics));

  CliProcess holder(small_run(text, used, 1, 100'000));
  wait_for_step(used, 12);
  for (const int world : {1, 2, 3, 4}) {
    CAPTURE(world);
    const auto second =
        run_to(2, joined(small_run(text, used, world, 20), {"--train.global_batch=12"}));
    CHECK(second.time < milliseconds(5000));
    CHECK(holds(second.err, used + " is in use by another run"));
    CHECK(holds(second.err, fmt::format("pid {}", holder.pid())));
  }
  CHECK(holder.running());
  holder.signal(SIGTERM);
  end_of(holder, 143);
}
