// A rank is killed, stopped, or exits at every labelled point of a run: all others exit in time and
// name it.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <mutex>

#include "tests/e2e/small_run.h"
#include "tests/faults/campaign.h"
#include "tests/support/fault_log.h"
#include "tests/support/machine_time.h"

using namespace tessera;
using namespace tessera::test;
using std::chrono::milliseconds;

namespace {

constexpr int kInitSeconds = 4;

struct Kind {
  const char* name;
  const char* fate;       ///< as survivors print it, after the process
  int code;               ///< the launcher's exit code
  milliseconds deadline;  ///< from the fault to the exit of the last process
};
constexpr Kind kKinds[] = {{"kill", "SIGKILL)", 4, milliseconds(3000)},
                           {"stop", "stopped)", 4, milliseconds(5000)},
                           {"abort", "SIGABRT)", 4, milliseconds(3000)},
                           {"exit", "exit code 7)", 7, milliseconds(3000)},
                           {"memory", "out of memory)", 5, milliseconds(3000)}};

struct Point {
  const char* name;
  int pass;
  bool rank_zero_only = false;
  bool memory = false;  ///< also a point where an allocation may fail and end the rank
  bool by_one = false;  ///< only the rank with the least to write passes this point
};
constexpr Point kPoints[] = {{"start", 1},
                             {"load", 1, false, true},
                             {"step", 3, false, true},
                             {"forward", 3, false, true},
                             {"backward", 3, false, true},
                             {"update", 3, false, true},
                             {"evaluate", 1, false, true},
                             {"save", 1},
                             {"all_gather", 20},
                             {"reduce_scatter", 7},
                             {"all_reduce", 3},
                             // The second save, of step 4; the checkpoint of step 2 exists.
                             {"save/shard-created", 2},
                             {"save/shard-written", 2},
                             {"save/shard-synced", 2},
                             {"save/part-written", 2},
                             {"save/trainer-written", 2, false, false, true},
                             {"save/directory-created", 2, true},
                             {"save/index-written", 2, true},
                             {"save/renamed", 2, true},
                             {"save/committed", 2, true}};

struct Case {
  Kind kind;
  Point point;
  int world, victim;
};

std::vector<Case> all_cases(const Kind& kind) {
  std::vector<Case> cases;
  for (int world = 2; world <= 4; ++world) {
    for (const Point& point : kPoints) {
      if (std::string_view(kind.name) == "memory" && !point.memory) continue;
      for (int victim = 0; victim < (point.rank_zero_only ? 1 : world); ++victim)
        cases.push_back({kind, point, world, victim});
    }
  }
  return cases;
}

struct Tally {
  int runs = 0, unreached = 0, by_one = 0, culprit = 0, result = 0, lost = 0, late = 0;
  milliseconds worst{}, stolen{}, time{};
  std::string stories;
};

Arguments arguments(const Fixture& setting, const std::string& run, int world, int steps) {
  return joined(small_run(setting.text, run, world, steps),
                {"--train.global_batch=12", "--train.eval_every=3", "--checkpoint.every=2",
                 fmt::format("--comm.init_timeout={}", kInitSeconds), "--checkpoint.timeout=20"});
}

// True if the rank's error names the culprit, its fate, and the rank's own step and phase.
bool names(const std::string& err, int rank, int victim, std::string_view fate) {
  const std::string prefix =
      rank == 0 ? "tessera: error: E0" : fmt::format("[rank {}] tessera: error: E0", rank);
  for (std::size_t at = err.find(prefix); at != err.npos; at = err.find(prefix, at + 1)) {
    if (at > 0 && err[at - 1] != '\n') continue;
    const std::string line = err.substr(at, err.find('\n', at) - at);
    if (holds(line, " step=") && holds(line, " phase=") &&
        holds(line, fmt::format(" culprit=rank {} ", victim)) &&
        holds(line, fmt::format("{} action=", fate))) {
      return true;
    }
  }
  return false;
}

// True if the launcher's last line names the first rank that failed.
bool last_line_names(const std::string& err, int victim) {
  const std::string_view text = std::string_view(err).substr(0, err.find_last_not_of('\n') + 1);
  const std::string_view line = text.substr(text.rfind('\n') + 1);
  return line.starts_with("tessera: ") && (holds(line, fmt::format("rank {} (", victim)) ||
                                           holds(line, fmt::format("missing: rank {};", victim)));
}

void strike(const Fixture& setting, const Case& c, std::size_t i, Tally& tally, std::mutex& mutex) {
  const std::string run = setting.dir.file(fmt::format("{}-{}", c.kind.name, i));
  const std::string mark = run + ".mark";
  const Variables variables = {{"LD_PRELOAD", kFaultPoints},
                               {"TESSERA_FAULT", fmt::format("{}:{}:{}:{}", c.kind.name,
                                                             c.point.name, c.point.pass, c.victim)},
                               {"TESSERA_FAULT_MARK", mark}};
  const auto result = run_cli(arguments(setting, run, c.world, 7), variables);
  const auto since_fault = Stopwatch::load(mark);
  const bool reached = since_fault.has_value();
  const auto after = reached ? since_fault->elapsed() : milliseconds(0);
  const auto wall = reached ? since_fault->wall() : milliseconds(0);

  const std::string_view point = c.point.name;
  // A rank that never arrived is only known to be missing.
  const bool unmet = point == "start" && std::string_view(c.kind.name) == "stop";
  const milliseconds wait_to_meet(unmet ? 1000 * kInitSeconds : 0);
  milliseconds deadline = c.kind.deadline + wait_to_meet;
  if (!tries_all()) deadline += milliseconds(20'000);  // only a full campaign measures time
  const std::string_view fate = unmet ? "" : c.kind.fate;
  bool named = last_line_names(result.err, c.victim);
  for (int rank = 0; rank < c.world; ++rank) {
    if (rank != c.victim && !names(result.err, rank, c.victim, fate)) named = false;
  }
  // The launcher, however, names the process that it started.
  if (unmet &&
      !holds(result.err, fmt::format("; of rank {}: the launcher started it as pid ", c.victim))) {
    named = false;
  }
  // Committed checkpoints are at even steps; the newest one must be valid and no older than the
  // last commit before the fault.
  Newest newest;
  if (std::filesystem::exists(run + "/checkpoints")) newest = newest_of(run + "/checkpoints");
  const int oldest = point == "save/renamed" || point == "save/committed" ? 4
                     : point.starts_with("save/")                         ? 2
                                                                          : -1;
  const bool lost = !newest.skipped.empty() || newest.step < oldest;

  const std::lock_guard lock(mutex);
  if (!reached && c.point.by_one && result.code == 0) return;  // another rank passes this point
  std::string wrong = reached ? "" : ", never reached";
  if (!reached) {
    ++tally.unreached;
  } else {
    const bool is_late = after > deadline, other_code = result.code != c.kind.code;
    wrong = fmt::format("{}{}{}{}", is_late ? ", late" : "", named ? "" : ", not named by all",
                        other_code ? ", another exit code" : "", lost ? ", lost" : "");
    tally.by_one += c.point.by_one ? 1 : 0;
    ++tally.runs;
    tally.worst = std::max(tally.worst, after - wait_to_meet);
    tally.stolen += wall - after;
    tally.time += wall;
    tally.late += is_late ? 1 : 0;
    tally.culprit += named ? 0 : 1;
    tally.result += other_code ? 1 : 0;
    tally.lost += lost ? 1 : 0;
  }
  log_fault(fmt::format(
      R"({{"fault": "{}", "point": "{}", "world": {}, "rank": {}, "ms": {}, "wrong": "{}"}})",
      c.kind.name, c.point.name, c.world, c.victim, (after - wait_to_meet).count(), wrong));
  if (!wrong.empty()) {
    tally.stories +=
        fmt::format("\n{} at pass {} of {}, rank {} of {}: {} ms{}; newest skipped: {}\n{}\n",
                    c.kind.name, c.point.pass, c.point.name, c.victim, c.world, wall.count(), wrong,
                    newest.skipped, result.describe());
  }
  std::error_code ignored;
  std::filesystem::remove_all(run, ignored);
}

std::vector<int> some_worlds() { return tries_all() ? std::vector{2, 3, 4} : std::vector{3}; }

}  // namespace

TEST_CASE("a rank that fails at any point of a run is named by all others, in time") {
  const InMemory setting;
  for (const Kind& kind : kKinds) {
    const auto salt = static_cast<std::size_t>(&kind - kKinds) * 7;
    const std::vector<Case> cases = sample(all_cases(kind), 6, salt);
    Tally tally;
    std::mutex mutex;
    for_all(cases.size(), [&](std::size_t i) { strike(setting, cases[i], i, tally, mutex); });
    const auto time = static_cast<double>(std::max<std::int64_t>(1, tally.time.count()));
    std::puts(fmt::format("| {} | {} | {} | {} | {} | {} | {:.1f} s | {:.0f}% |", kind.name,
                          tally.runs, tally.culprit, tally.result, tally.lost, tally.late,
                          static_cast<double>(tally.worst.count()) / 1e3,
                          100.0 * static_cast<double>(tally.stolen.count()) / time)
                  .c_str());
    std::fflush(stdout);
    INFO(tally.stories);
    CHECK(tally.unreached == 0);
    if (tries_all() && std::string_view(kind.name) != "memory")
      CHECK(tally.by_one == 3);  // once per world size
    CHECK(tally.culprit == 0);
    CHECK(tally.result == 0);
    CHECK(tally.lost == 0);
    CHECK(tally.late == 0);
  }
}

TEST_CASE(
    "a rank that hangs while its heartbeat continues is named at the deadline of the others' "
    "wait") {
  struct Hang {
    const char* point;
    const char* option;
    int world, victim;
  };
  std::vector<Hang> hangs;
  for (const int world : some_worlds()) {
    for (int victim = 0; victim < world; ++victim) {
      hangs.push_back({"load", "--checkpoint.load_timeout=8", world, victim});
      hangs.push_back({"backward", "--comm.timeout=8", world, victim});
    }
  }
  const InMemory setting;
  std::mutex mutex;
  for_all(hangs.size(), [&](std::size_t i) {
    const auto& [point, option, world, victim] = hangs[i];
    const std::string run = setting.dir.file(fmt::format("hang-{}", i));
    const auto first = run_cli(arguments(setting, run, world, 2));
    const auto result = run_cli(joined(arguments(setting, run, world, 4), {option}),
                                {{"LD_PRELOAD", kFaultPoints},
                                 {"TESSERA_FAULT", fmt::format("hang:{}:1:{}", point, victim)}});
    const std::lock_guard lock(mutex);
    CAPTURE(point);
    CAPTURE(world);
    CAPTURE(victim);
    CHECK(first.code == 0);
    CHECK(result.code == 4);
    for (int rank = 0; rank < world; ++rank)
      if (rank != victim) CHECK(names(result.err, rank, victim, ""));
  });
}

TEST_CASE("a rank that dies twice at the same place is dropped, and its checkpoint data are kept") {
  const InMemory setting;
  for (const int world : some_worlds()) {
    CAPTURE(world);
    const std::string run = setting.dir.file(fmt::format("fewer-{}", world));
    const auto result = run_cli(joined(arguments(setting, run, world, 4),
                                       {"--restarts=3", "--min-nproc=1", "--checkpoint.async=off"}),
                                {{"LD_PRELOAD", kFaultPoints},
                                 {"TESSERA_FAULT", fmt::format("kill:evaluate:1:{}", world - 1)}});
    CHECK(result.code == 0);
    CHECK(holds(result.err, fmt::format("resuming from step 2 with {} rank", world - 1)));
    CHECK(newest_of(run + "/checkpoints").step == 4);
  }
}

TEST_CASE("a slow rank is named, and no rank is ended for it") {
  const InMemory setting;
  for (const int world : some_worlds()) {
    for (int slow = 0; slow < world; ++slow) {
      if (slow != 1 && !tries_all()) continue;
      CAPTURE(world);
      CAPTURE(slow);
      const std::string run = setting.dir.file(fmt::format("slow-{}-{}", world, slow));
      const auto result =
          run_cli(joined(arguments(setting, run, world, 130), {"--checkpoint.every=0"}),
                  {{"LD_PRELOAD", kFaultPoints},
                   {"TESSERA_FAULT", fmt::format("slow:forward:10:{}", slow)}});
      CHECK(result.code == 0);
      CHECK(holds(result.err, "is slow: it computes"));
      for (int rank = 0; rank < world; ++rank) {
        const bool named = holds(result.err, fmt::format("warning: rank {} (", rank));
        CHECK(named == (rank == slow));
      }
    }
  }
}

TEST_CASE("a rank that arrives late is waited for") {
  const InMemory setting;
  for (const int world : some_worlds()) {
    for (int late = 0; late < world; ++late) {
      CAPTURE(world);
      CAPTURE(late);
      const std::string run = setting.dir.file(fmt::format("late-{}-{}", world, late));
      const auto result = run_cli(
          joined(arguments(setting, run, world, 2), {"--comm.init_timeout=30"}),
          {{"LD_PRELOAD", kFaultPoints}, {"TESSERA_FAULT", fmt::format("late:start:1:{}", late)}});
      CHECK(result.code == 0);
    }
  }
}
