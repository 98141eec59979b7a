// Runs that are killed, stopped, or moved to other world sizes give the same results when resumed.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/e2e/small_run.h"

using namespace tessera;
using test::Arguments;
using test::CliProcess;
using test::joined;
using test::run_cli;
using test::small_run;

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

// False if the program ends first, or on timeout.
template <typename Condition>
bool wait_until(CliProcess& process, Condition&& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (!process.running() || std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

bool wait_for_step(CliProcess& process, const fs::path& run, std::int64_t step) {
  return wait_until(process, [&] { return last_step(run) >= step; });
}

nlohmann::json inspect(const fs::path& run) {
  const auto result = run_cli({"checkpoint", "inspect", run, "--json"});
  INFO(result.describe());
  REQUIRE(result.code == 0);
  return nlohmann::json::parse(result.out);
}

void check_same(const fs::path& run, const fs::path& expected) {
  CHECK((test::read_metrics(run) == test::read_metrics(expected)));
  CHECK(inspect(run).at("step") == inspect(expected).at("step"));
  CHECK(inspect(run).at("digest") == inspect(expected).at("digest"));
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

TEST_CASE_FIXTURE(Fixture, "runs killed at random moments end like undisturbed ones") {
  constexpr int kKills = 4;
  constexpr int kSteps = 100;
  std::mt19937 random(20240501);
  for (const int world : {1, 2}) {
    CAPTURE(world);
    const std::string calm = dir.file(fmt::format("calm-{}", world));
    const std::string killed = dir.file(fmt::format("killed-{}", world));
    const auto command = [&](const std::string& run) {
      return joined(small_run(text, run, world, kSteps), {"--checkpoint.every=4"});
    };
    run(command(calm));
    for (int kill = 1; kill <= kKills; ++kill) {
      CAPTURE(kill);
      CliProcess process(command(killed));
      // Killed in a step, a save or an evaluation, with enough steps left for a fast machine; every
      // fourth time during the start.
      if (kill % 4 != 0) {
        REQUIRE(wait_for_step(process, killed, kill * 11 - random() % 5));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
      process.signal_group(SIGKILL);
      const auto result = process.wait(std::chrono::seconds(10));
      INFO(result.describe());
      REQUIRE(result.signal == SIGKILL);
    }
    const std::string messages = run(command(killed));
    CHECK(messages.find(", from " + killed + "/checkpoints/step-") != std::string::npos);
    check_same(killed, calm);
    CHECK(run_cli({"checkpoint", "verify", killed}).code == 0);
    // Remains of killed saves are removed.
    for (const auto& entry : fs::directory_iterator(fs::path(killed) / "checkpoints")) {
      CHECK(entry.path().extension() != ".tmp");
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "bf16 master weights are stored as bf16, and resume bit for bit") {
  const std::string whole = dir.file("whole"), half = dir.file("half");
  const auto command = [&](const std::string& out, int steps) {
    return joined(small_run(text, out, 2, steps), {"--train.precision=bf16-true"});
  };
  run(command(whole, 20));
  run(command(half, 10));
  run(command(half, 20));
  CHECK((test::read_metrics(half).steps == test::read_metrics(whole).steps));
  CHECK(inspect(half).at("digest") == inspect(whole).at("digest"));
  for (const auto& tensor : inspect(half).at("tensors"))
    CHECK(tensor.at("dtype") == (tensor.at("section") == "model" ? "BF16" : "F32"));
  run(joined(small_run(text, half, 1, 22), {"--train.precision=fp32"}));
  run(command(half, 24));
}

TEST_CASE_FIXTURE(Fixture, "dropout, the schedule and the data resume bit for bit") {
  for (const int world : {1, 3}) {
    CAPTURE(world);
    const auto command = [&](const std::string& out, const std::string& stop_after) {
      return joined(small_run(text, out, world, 30),
                    {"--train.global_batch=12", "--model.dropout=0.2", "--optim.schedule=cosine",
                     "--checkpoint.every=" + stop_after, "--checkpoint.keep=0"});
    };
    const std::string whole = dir.file(fmt::format("dropped-{}", world));
    run(command(whole, "7"));
    const std::string half = dir.file(fmt::format("dropped-half-{}", world));
    fs::copy(whole, half, fs::copy_options::recursive);
    for (const char* step : {"step-00000021", "step-00000028", "step-00000030"})
      fs::remove_all(fs::path(half) / "checkpoints" / step);
    CHECK(run(command(half, "7")).find("step 14 of 30, from") != std::string::npos);
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
    run(command(whole, saved, 16));
    run(command(half, saved, 8));
    const auto expected = test::read_metrics(whole);
    for (const int world : {1, 2, 3, 4}) {
      CAPTURE(world);
      const std::string moved = dir.file(fmt::format("moved-{}-{}", saved, world));
      fs::copy(half, moved, fs::copy_options::recursive);
      run(command(moved, world, 16));
      const auto metrics = test::read_metrics(moved);
      REQUIRE(metrics.steps.size() == expected.steps.size());
      for (std::size_t i = 0; i < metrics.steps.size(); ++i) {
        CAPTURE(i);
        CHECK(test::relative(metrics.steps[i].loss, expected.steps[i].loss) < 1e-5);
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
    run(command(calm, world));
    // Schedulers signal the program; timeout(1) and others the program, then its group. A
    // preemption may reach a single rank.
    for (const std::string whom : {"program", "group", "both", "rank"}) {
      if (world == 1 && whom != "program") continue;
      if (world > 2 && whom != "rank") continue;
      CAPTURE(world);
      CAPTURE(whom);
      const std::string stopped = dir.file(fmt::format("stopped-{}-{}", world, whom));
      CliProcess process(command(stopped, world));
      REQUIRE(wait_for_step(process, stopped, 15));
      if (whom == "program" || whom == "both") process.signal(SIGTERM);
      if (whom == "group" || whom == "both") process.signal_group(SIGTERM);
      if (whom == "rank") ::kill(process.ranks().at(1), SIGTERM);
      const auto result = process.wait(std::chrono::seconds(10));
      INFO(result.describe());
      CHECK(result.in_time);
      CHECK(result.code == 143);
      CHECK(result.err.find("by signal 15 after step") != std::string::npos);
      const auto step = inspect(stopped).at("step").get<std::size_t>();
      CHECK(step >= 16);
      CHECK(step == test::read_metrics(stopped).steps.size());
      run(command(stopped, world));
      check_same(stopped, calm);
    }
  }
}

TEST_CASE_FIXTURE(Fixture,
                  "a SIGINT is answered once for all ranks, and a later one ends the run at once") {
  // Steps of minutes: a clean stop would have to wait.
  CliProcess process(joined(small_run(text, dir.file("run"), 2, 50),
                            {"--train.global_batch=400000", "--train.micro_batch=4"}));
  REQUIRE(wait_until(process, [&] {
    std::ifstream log(dir.file("run/logs/rank-0.log"));
    const std::string lines{std::istreambuf_iterator<char>(log), {}};
    return lines.find("start at step 0") != std::string::npos;
  }));
  process.signal(SIGINT);
  const std::string answer = "press Ctrl-C again to quit without saving";
  REQUIRE(wait_until(process, [&] { return process.err().find(answer) != std::string::npos; }));
  std::this_thread::sleep_for(milliseconds(1100));  // earlier ones count as the same request
  REQUIRE(process.running());
  process.signal(SIGINT);
  const auto result = process.wait(std::chrono::seconds(5));
  INFO(result.describe());
  CHECK(result.in_time);
  CHECK(result.code == 128 + SIGINT);
  CHECK(result.err.find(answer) == result.err.rfind(answer));
  CHECK(result.err.find("no step is lost") != std::string::npos);
}

TEST_CASE_FIXTURE(Fixture, "a weights-only checkpoint cannot be resumed, but can start a run") {
  const std::string weights = dir.file("weights");
  run(joined(small_run(text, weights, 1, 20),
             {"--checkpoint.what=model", "--train.global_batch=12"}));
  const auto sections = inspect(weights).at("sections").get<std::vector<std::string>>();
  CHECK(std::find(sections.begin(), sections.end(), "optimizer") == sections.end());
  for (const int world : {1, 3}) {
    const auto refused =
        run_cli(joined(small_run(text, weights, world, 40), {"--train.global_batch=12"}));
    INFO(refused.describe());
    CHECK(refused.code == 2);
    CHECK(refused.err.find("holds no optimizer state (it was saved with checkpoint.what=model)") !=
          std::string::npos);
    CHECK(refused.err.find("--model.init_from") != std::string::npos);
  }
  // Refused before the existing files are modified.
  CHECK(test::read_metrics(weights).steps.size() == 20);

  const std::string started = dir.file("started");
  run(joined(small_run(text, started, 2, 5), {"--model.init_from=" + weights}));
  const auto before = test::read_metrics(weights).val_loss.at(20);
  CHECK(std::stod(test::read_metrics(started).steps.at(0).loss) <
        std::stod(test::read_metrics(weights).steps.at(5).loss));
  CHECK(std::abs(std::stod(test::read_metrics(started).steps.at(0).loss) - std::stod(before)) <
        0.5);
}

TEST_CASE_FIXTURE(Fixture, "a run directory belongs to one run, and to one job at a time") {
  const std::string used = dir.file("used");
  run(small_run(text, used, 1, 10));
  const auto refused = run_cli(joined(small_run(text, used, 1, 20), {"--checkpoint.resume=never"}));
  INFO(refused.describe());
  CHECK(refused.code == 2);
  CHECK(refused.err.find(used + " holds a run with checkpoints up to step 10") !=
        std::string::npos);
  CHECK(test::read_metrics(used).steps.size() == 10);

  const auto metrics = test::read_metrics(used);
  CHECK(run(small_run(text, used, 1, 10)).find("raise --train.steps to continue") !=
        std::string::npos);
  CHECK((test::read_metrics(used) == metrics));

  CliProcess holder(small_run(text, used, 1, 100'000));
  REQUIRE(wait_for_step(holder, used, 12));
  for (const int world : {1, 2, 3, 4}) {
    CAPTURE(world);
    const auto second =
        run_cli(joined(small_run(text, used, world, 20), {"--train.global_batch=12"}));
    INFO(second.describe());
    CHECK(second.code == 2);
    CHECK(second.time < milliseconds(5000));
    CHECK(second.err.find(used + " is in use by another run") != std::string::npos);
    CHECK(second.err.find(fmt::format("pid {}", holder.pid())) != std::string::npos);
  }
  CHECK(holder.running());
  holder.signal(SIGTERM);
  CHECK(holder.wait(std::chrono::seconds(10)).code == 143);
}
