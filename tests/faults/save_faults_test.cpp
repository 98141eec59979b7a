// At every system call of a save the rank is killed or stopped, or the call fails: afterwards the
// old or the new checkpoint is valid, and the failed rank is named.

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "tests/faults/campaign.h"
#include "tests/support/fault_log.h"
#include "tests/support/machine_time.h"

using namespace tessera;
using namespace tessera::test;

namespace fs = std::filesystem;

namespace {

using std::chrono::milliseconds;

constexpr int kIoExit = 3, kCommExit = 4;
// Time limit after the fault, without stolen time. Only a full campaign measures time; otherwise
// other tests may load the machine.
milliseconds in_time(const std::string& kind) {
  const milliseconds promised(kind == "stop" ? 5000 : 3000);
  return tries_all() ? promised : promised + milliseconds(20'000);
}

struct Point {
  int world = 0;
  std::string kind;
  LoggedCall call;
  bool tolerated = false;  ///< does not make the save fail
  std::int64_t step = 0;   ///< step of the save that it belongs to
};

struct Outcome {
  bool reached = false;
  CliResult cli;
  milliseconds after{};  ///< from the fault to the exit of the last process
  Newest newest;
  bool resumed_well = true;
};

/// Counts of failed trials, with a report on each.
struct Tally {
  std::int64_t points = 0, lost = 0, mixed = 0, culprit = 0, late = 0, result = 0;
  milliseconds worst{};
  std::string stories;

  bool clean() const { return lost + mixed + culprit + late + result == 0; }
  void print(const std::string& kind) const {
    std::puts(fmt::format("| {} | {} | {} | {} | {} | {} | {} | {:.1f} s |", kind, points, lost,
                          mixed, culprit, result, late, static_cast<double>(worst.count()) / 1e3)
                  .c_str());
    std::fflush(stdout);
  }
};

// Calls after the commit (`latest`, retention) and cleanup calls are tolerated: they never make a
// save fail.
std::vector<Point> points_of_calls(int world) {
  std::vector<Point> points;
  std::map<int, std::vector<LoggedCall>> by_rank;
  for (const LoggedCall& call : saved_run(world).calls()) by_rank[call.rank].push_back(call);
  for (const auto& [rank, calls] : by_rank) {
    std::int64_t step = kFirstStep + 1;
    std::int64_t since_commit = -1;  // calls, on rank 0
    for (const LoggedCall& call : calls) {
      if (holds(call.path, fmt::format("step-{:08}.", kLastStep)) ||
          (call.name == "mkdir" && since_commit >= 0)) {
        if (step != kLastStep) since_commit = -1;
        step = kLastStep;
      }
      if (since_commit >= 0) ++since_commit;
      const std::string target = fmt::format("/step-{:08}", step);
      if (call.name == "rename" && call.path2.ends_with(target)) since_commit = 0;
      // The commit's last three calls open, sync and close the directory.
      const bool tidies = since_commit > 3 || call.name == "close" || call.name == "failed" ||
                          (call.name == "remove" && call.path.ends_with(".part.json"));
      points.push_back({world, "", call, tidies, step});
    }
  }
  return points;
}

std::vector<Point> points(const std::string& kind, const std::vector<std::string>& names = {}) {
  std::vector<Point> chosen;
  for (const int world : kWorlds) {
    for (Point point : points_of_calls(world)) {
      if (!names.empty() && std::find(names.begin(), names.end(), point.call.name) == names.end()) {
        continue;
      }
      point.kind = kind;
      chosen.push_back(std::move(point));
    }
  }
  return chosen;
}

Outcome run_once(const Point& point, std::size_t i, bool resume) {
  const std::string name = fmt::format("{}-{}", point.kind, i);
  const SavedRun& saved = saved_run(point.world);
  const std::string run = saved.copy(name);
  const std::string mark = run + ".mark";
  Outcome outcome;
  outcome.cli = run_cli(saved.resume_arguments(run),
                        {{"LD_PRELOAD", kFailingCalls},
                         {"TESSERA_FAULT_RANK", std::to_string(point.call.rank)},
                         {"TESSERA_FAULT_CALL", std::to_string(point.call.number)},
                         {"TESSERA_FAULT_KIND", point.kind},
                         {"TESSERA_FAULT_MARK", mark}});
  const auto since_fault = Stopwatch::load(mark);
  outcome.reached = since_fault.has_value();
  if (since_fault) outcome.after = since_fault->elapsed();
  outcome.newest = newest_of(run);
  if (resume) {
    const auto again = run_cli(saved.resume_arguments(run));
    const auto newest = newest_of(run);
    outcome.resumed_well = again.code == 0 && newest.step == kLastStep &&
                           newest.content == saved.content().at(newest.step);
  }
  std::error_code ignored;
  fs::remove_all(run, ignored);
  fs::remove(mark, ignored);
  return outcome;
}

// On an overloaded machine not all ranks may start in time: such trials say nothing and are
// repeated.
Outcome run(const Point& point, std::size_t i, bool resume) {
  Outcome outcome = run_once(point, i, resume);
  for (int again = 0; again < 3 && !outcome.reached && outcome.cli.code != 0; ++again) {
    outcome = run_once(point, i, resume);
  }
  return outcome;
}

// Index, final directory name, and `latest`.
bool takes_part_in_commit(const LoggedCall& call) {
  for (const char* part : {"/index.json", "/latest"})
    if (holds(call.path, part) || holds(call.path2, part)) return true;
  return call.path.ends_with("/checkpoints") || holds(call.path2, "/step-");
}

/// Returns why an outcome is wrong, beyond the checks common to all kinds; starts with "culprit" or
/// "result".
using Judge = std::function<std::string(const Point&, const Outcome&)>;

Tally campaign(const std::vector<Point>& points, std::size_t resume_every, const Judge& judge) {
  std::vector<Outcome> outcomes(points.size());
  for_all(points.size(), [&](std::size_t i) {
    outcomes[i] = run(points[i], i, resume_every > 0 && i % resume_every == 0);
  });
  Tally tally;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const Point& point = points[i];
    const Outcome& outcome = outcomes[i];
    ++tally.points;
    tally.worst = std::max(tally.worst, outcome.after);
    std::string wrong;
    const auto& content = saved_run(point.world).content();
    const auto expected = content.find(outcome.newest.step);
    // Without the fault, the run may have ended at any step.
    const std::int64_t oldest = outcome.reached ? point.step - 1 : kFirstStep;
    if (outcome.newest.step < oldest || expected == content.end() || !outcome.resumed_well) {
      ++tally.lost;
      wrong += " lost";
    } else if (expected->second != outcome.newest.content) {
      ++tally.mixed;
      wrong += " mixed";
    }
    if (!outcome.cli.in_time || outcome.after > in_time(point.kind)) {
      ++tally.late;
      wrong += " late";
    }
    const std::string why = outcome.reached ? judge(point, outcome) : "result: no such call";
    if (why.starts_with("culprit")) ++tally.culprit;
    if (why.starts_with("result")) ++tally.result;
    wrong += why.empty() ? "" : " " + why;
    const bool commits = point.call.rank == 0 && takes_part_in_commit(point.call);
    log_fault(fmt::format(
        R"({{"fault": "{}", "point": "{}", "world": {}, "rank": {}, "ms": {}, "wrong": "{}"}})",
        point.kind, commits ? "commit" : "save", point.world, point.call.rank,
        outcome.after.count(), wrong));
    if (!wrong.empty() && tally.stories.size() < 30'000) {
      tally.stories += fmt::format(
          "{} at call {} of rank {} of {}, {} {} {} (save of step {}):{}; newest is step {}, "
          "skipped {}\n{}\n",
          point.kind, point.call.number, point.call.rank, point.world, point.call.name,
          point.call.path, point.call.path2, point.step, wrong, outcome.newest.step,
          outcome.newest.skipped, outcome.cli.describe());
    }
  }
  return tally;
}

std::string judge_kill(const Point& point, const Outcome& outcome) {
  if (outcome.cli.code != kCommExit) return "result: another exit code";
  const std::string& err = outcome.cli.err;
  if (!holds(err, fmt::format("rank {} (pid ", point.call.rank)) ||
      !holds(err, "was killed by SIGKILL")) {
    return "culprit: not named";
  }
  return "";
}

std::string judge_stop(const Point& point, const Outcome& outcome) {
  if (outcome.cli.code != kCommExit && outcome.cli.code != kIoExit) {
    return "result: another exit code";
  }
  return holds(outcome.cli.err, fmt::format("rank {}", point.call.rank)) ? ""
                                                                         : "culprit: not named";
}

// File name as errors print it, without the run id that differs between attempts.
std::string reported_name(const std::string& path) {
  const std::string name = fs::path(path).filename();
  return name.starts_with("step-") ? name.substr(0, name.find('.')) : name;
}

std::string judge_failure(const Point& point, const Outcome& outcome) {
  const std::string& err = outcome.cli.err;
  const bool failed = holds(err, "was not saved");
  const bool last = point.step == kLastStep;
  const int code = failed && last ? kIoExit : 0;
  if (outcome.cli.code != code) return fmt::format("result: exit code {} expected", code);
  if (code == 0 && outcome.newest.step != kLastStep) return "result: not the last step";
  const bool repeated =
      (point.kind == "EINTR" || point.kind == "short") && point.call.name == "write";
  if (failed && repeated) return "result: the write was not tried again";
  // Retention keeps old checkpoints, with a warning, if a file cannot be opened for verification.
  const bool reported = failed || (point.call.name == "open" &&
                                   holds(err, "warning: old checkpoints were not removed: "));
  if (!reported && !repeated && !point.tolerated && point.kind != "EINTR") {
    return "result: a failing call was ignored";
  }
  if (reported && !holds(err, fmt::format("rank {}: ", point.call.rank))) {
    return "culprit: the rank is not named";
  }
  if (reported && !holds(err, reported_name(point.call.path)))
    return "culprit: the file is not named";
  return "";
}

void check(const std::string& kind, const Tally& tally) {
  tally.print(kind);
  CAPTURE(kind);
  INFO(tally.stories);
  CHECK(tally.points > 0);
  CHECK(tally.clean());
}

const std::vector<std::string> kNeedsSpace = {"create", "mkdir",  "write",
                                              "sync",   "rename", "close"};
const std::vector<std::string> kChangesNames = {"create", "mkdir", "rename", "remove"};
const std::vector<std::string> kCanBeInterrupted = {"create", "open", "write", "sync", "close"};

}  // namespace

TEST_CASE("a rank is killed at any call of a save: the old or the new checkpoint is valid") {
  for (const char* kind : {"kill", "kill-after", "kill-half"}) {
    const bool half = std::string(kind) == "kill-half";
    const auto all = half ? points(kind, {"write"}) : points(kind);
    check(kind, campaign(sample(all, half ? 3 : 6, 5), tries_all() ? 20 : 3, judge_kill));
  }
}

TEST_CASE("any call of a save fails: rank and file are named, and training continues") {
  std::size_t seed = 1;
  for (const auto& [kind, names] :
       std::map<std::string, std::vector<std::string>>{{"ENOSPC", kNeedsSpace},
                                                       {"EIO", {}},
                                                       {"EROFS", kChangesNames},
                                                       {"EINTR", kCanBeInterrupted},
                                                       {"short", {"write"}}}) {
    seed += 7;
    check(kind, campaign(sample(points(kind, names), 4, seed), 0, judge_failure));
  }
}

TEST_CASE("a rank stopped during a save is named, and the previous checkpoint stays valid") {
  check("stop", campaign(sample(points("stop", {"mkdir", "create", "sync", "rename"}), 2, 3), 0,
                         judge_stop));
}
