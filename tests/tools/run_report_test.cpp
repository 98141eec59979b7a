// Verdicts and pages of reports on hand-made records.
#include <doctest/doctest.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "comm/flight_recorder.h"
#include "tests/support/check_throws.h"
#include "tests/support/multiprocess.h"
#include "tests/support/temp_dir.h"
#include "tests/support/text.h"
#include "tools/tessera/run_report/evidence.h"
#include "tools/tessera/run_report/render.h"
#include "tools/tessera/run_report/verdict.h"

using namespace tessera;
using namespace tessera::tools;
using comm::FlightEnd;
using comm::FlightState;

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kStart = 1'700'000'000 * kSecond;  // wall clock
constexpr std::int64_t kNow = kStart + 100 * kSecond;

comm::Signature signature(std::uint64_t sequence, std::string_view label = "h.1") {
  comm::Collective c;
  c.kind = comm::CollectiveKind::AllGather;
  c.dtype = DType::F32;
  c.count = 64;
  c.sequence = sequence;
  c.label = label;
  return comm::Signature(c);
}

// Ranks in step 12 that have finished collectives 0 to 7; seconds count from their start.
struct Run {
  std::vector<RankEvidence> ranks;

  explicit Run(int world, ProcessState process) {
    for (int r = 0; r < world; ++r) {
      RankEvidence rank;
      rank.rank = r;
      rank.process = process;
      comm::FlightRecord record;
      record.rank = r;
      record.world_size = world;
      record.host = "here";
      record.pid = 100 + r;
      record.start_wall_ns = kStart;
      record.phase = "step";
      record.step = 12;
      for (std::uint64_t i = 0; i < 8; ++i) {
        record.collectives.push_back(
            {signature(i), 256, kSecond, kSecond, 2 * kSecond, FlightState::Done, i});
      }
      rank.record = record;
      ranks.push_back(rank);
    }
  }
  comm::FlightRecord& record(int rank) { return *ranks[static_cast<std::size_t>(rank)].record; }
  RankEvidence& at(int rank) { return ranks[static_cast<std::size_t>(rank)]; }
  void enter(int rank, int seconds, std::string_view label = "h.1") {
    auto& all = record(rank).collectives;
    all.push_back({signature(all.size(), label), 256, seconds * kSecond, seconds * kSecond, 0,
                   FlightState::Running, all.size()});
  }
  void end(int rank, FlightEnd kind, int culprit, const std::string& text, int seconds = 50) {
    comm::FlightRecord& r = record(rank);
    r.end = kind;
    r.end_culprit = culprit;
    r.end_text = text;
    r.end_ns = seconds * kSecond;
    if (!r.collectives.empty() && r.collectives.back().state == FlightState::Running) {
      r.collectives.back().state = FlightState::Failed;
    }
  }
  Verdict judge() const { return judge_run(ranks, kNow); }
};

void check(const Verdict& verdict, VerdictKind kind, const std::vector<int>& culprits,
           const std::vector<std::string>& parts = {}) {
  INFO(verdict.headline);
  CHECK(verdict_name(verdict.kind) == verdict_name(kind));
  CHECK(verdict.culprits == culprits);
  for (const std::string& part : parts) {
    INFO(part);
    CHECK(test::holds(verdict.headline, part));
  }
}

}  // namespace

TEST_CASE("a killed rank is named with its place; of several, the one behind or blamed") {
  Run run(3, ProcessState::Gone);
  for (const int r : {0, 1}) {
    run.enter(r, 40);
    run.end(r, FlightEnd::PeerLost, 2, "lost rank 2");
  }
  const Verdict verdict = run.judge();
  check(verdict, VerdictKind::Killed, {2},
        {"rank 2 (here, pid 102) was killed in phase step, step 12, after all_gather#7 (h.1)"});
  REQUIRE(verdict.evidence.size() == 1);
  CHECK(verdict.evidence[0] == "ranks 0, 1: ended: peer lost: lost rank 2");
  run.enter(2, 40);
  check(run.judge(), VerdictKind::Killed, {2}, {"was killed in all_gather#8 (h.1)", "step 12"});
  // Errors that follow from it are not the cause, wherever they occur.
  run.end(0, FlightEnd::Error, -1, "the save failed: rank 2 is gone");
  check(run.judge(), VerdictKind::Killed, {2});
  Run elsewhere(3, ProcessState::Unknown);
  for (const int r : {0, 1}) elsewhere.end(r, FlightEnd::PeerLost, 2, "lost rank 2");
  check(elsewhere.judge(), VerdictKind::Killed, {2});

  Run several(3, ProcessState::Gone);
  several.enter(1, 40);
  several.end(0, FlightEnd::Aborted, -1, "rank 0 gave up");
  check(several.judge(), VerdictKind::Killed, {2});
  several.end(0, FlightEnd::Aborted, 1, "");
  check(several.judge(), VerdictKind::Killed, {1});
}

TEST_CASE("if all ranks are killed, as with their host, no rank is blamed") {
  Run run(3, ProcessState::Gone);
  check(run.judge(), VerdictKind::Killed, {}, {"all ranks were killed"});
  Run alone(1, ProcessState::Gone);
  check(alone.judge(), VerdictKind::Killed, {0}, {"rank 0 (here, pid 100) was killed"});
}

TEST_CASE("a stopped rank is named, in a waiting run and in one that gave up") {
  Run run(3, ProcessState::Running);
  for (const int r : {0, 1}) run.enter(r, 99);
  run.at(2).process = ProcessState::Stopped;
  check(run.judge(), VerdictKind::Stopped, {2}, {"rank 2 (here, pid 102) is stopped"});
  // The launcher has killed the stopped rank meanwhile.
  for (const int r : {0, 1}) run.end(r, FlightEnd::Timeout, 2, "missing: rank 2");
  for (const int r : {0, 1, 2}) run.at(r).process = ProcessState::Gone;
  check(run.judge(), VerdictKind::Stopped, {2}, {"was stuck", "until the deadline"});
}

TEST_CASE("a rank that others wait for is reported as behind after a long wait") {
  Run run(3, ProcessState::Running);
  for (const int r : {0, 2}) run.enter(r, 95);
  check(run.judge(), VerdictKind::Running, {});
  for (const int r : {0, 2}) run.record(r).collectives.back().started_ns = 60 * kSecond;
  check(run.judge(), VerdictKind::Stopped, {1}, {"rank 1", "have waited for 40.0 s"});
}

TEST_CASE("collectives of different groups are not compared") {
  Run run(3, ProcessState::Running);
  for (const int r : {0, 1, 2}) {
    run.enter(r, 99, r == 0 ? "h.1" : "h.2");
    run.record(r).collectives.back().group = r == 0 ? 7 : 8;
  }
  CHECK(run.judge().kind != VerdictKind::Mismatch);
}

TEST_CASE("different collectives: the odd rank is named, by majority") {
  Run run(3, ProcessState::Gone);
  run.enter(0, 40, "h.1");
  run.enter(1, 40, "h.2");
  run.enter(2, 40, "h.1");
  for (const int r : {0, 1, 2}) run.end(r, FlightEnd::Mismatch, 1, "ranks disagree");
  check(
      run.judge(), VerdictKind::Mismatch, {1},
      {"rank 1 (here, pid 101) called all_gather#8 (h.2)", "the others called all_gather#8 (h.1)"});
  // Without records of the collectives themselves.
  for (const int r : {0, 1, 2}) run.record(r).collectives.clear();
  check(run.judge(), VerdictKind::Mismatch, {1}, {"ranks disagree"});
}

TEST_CASE("a rank's own error is the cause of the others' errors") {
  Run run(3, ProcessState::Gone);
  for (const int r : {0, 2}) run.end(r, FlightEnd::PeerLost, 1, "lost rank 1", 49);
  run.end(1, FlightEnd::OutOfMemory, -1, "needs 5 GiB", 50);
  check(run.judge(), VerdictKind::OutOfMemory, {1}, {"ran out of memory", "needs 5 GiB"});
  run.end(2, FlightEnd::Error, -1, "cannot write", 30);  // the first by its own clock
  check(run.judge(), VerdictKind::Error, {2}, {"failed", "cannot write"});
}

TEST_CASE("pure communication errors name the rank that they blame") {
  Run run(2, ProcessState::Gone);
  run.end(0, FlightEnd::Aborted, 1, "network down", 40);
  run.end(1, FlightEnd::Aborted, 1, "network down", 50);
  check(run.judge(), VerdictKind::Communication, {1}, {"first on rank 0", "network down"});
  // If ranks cannot reach each other, none is blamed, even if one was behind.
  Run cut(3, ProcessState::Gone);
  cut.enter(0, 40);
  for (const int r : {0, 1, 2})
    cut.end(r, FlightEnd::Aborted, -1, "ranks 1, 2 wait for each other");
  check(cut.judge(), VerdictKind::Communication, {}, {"ranks 1, 2 wait for each other"});
}

TEST_CASE("a clean end, a stop by signal, and a running run") {
  Run run(2, ProcessState::Gone);
  for (const int r : {0, 1}) run.end(r, FlightEnd::Done, -1, "");
  check(run.judge(), VerdictKind::Done, {}, {"finished 50.0 s ago"});
  for (const int r : {0, 1}) run.record(r).end_text = "stopped by signal 15";
  check(run.judge(), VerdictKind::Done, {}, {"stopped by signal 15"});
  check(Run(2, ProcessState::Running).judge(), VerdictKind::Running, {},
        {"is running", "phase step, step 12", "98.0 s ago"});
  check(Run(2, ProcessState::Unknown).judge(), VerdictKind::Unclear, {}, {"recorded no end"});
}

TEST_CASE("ranks that never started, all or one") {
  Run run(3, ProcessState::Gone);
  run.at(1).record.reset();
  run.at(1).problem = "no record";
  for (const int r : {0, 2}) {
    run.record(r).collectives.clear();
    run.end(r, FlightEnd::Timeout, 1, "missing: rank 1");
  }
  check(run.judge(), VerdictKind::NeverStarted, {1}, {"rank 1 is missing: no record"});
  for (RankEvidence& rank : run.ranks) rank.record.reset();
  check(run.judge(), VerdictKind::NeverStarted, {}, {"no flight records"});
  check(judge_run({}, kNow), VerdictKind::NeverStarted, {});
}

TEST_CASE("a rank without a record did start if all ranks met") {
  Run run(3, ProcessState::Gone);
  run.at(1).record.reset();
  run.at(1).problem = "no record";
  for (const int r : {0, 2}) run.end(r, FlightEnd::PeerLost, 1, "lost rank 1");
  check(run.judge(), VerdictKind::Killed, {1}, {"rank 1 was lost", "no record"});
  for (const int r : {0, 2}) run.end(r, FlightEnd::Timeout, 1, "waited for rank 1");
  check(run.judge(), VerdictKind::Stopped, {1}, {"rank 1 was stuck", "no record"});
  for (const int r : {0, 2}) run.record(r).collectives.clear();
  check(run.judge(), VerdictKind::NeverStarted, {1}, {"rank 1 is missing"});
}

TEST_CASE("rank lists are abbreviated") {
  CHECK(format_ranks(std::vector<int>{}) == "");
  CHECK(format_ranks(std::vector{4}) == "4");
  CHECK(format_ranks(std::vector{0, 1, 3}) == "0, 1, 3");
  CHECK(format_ranks(std::vector{0, 2, 3, 4, 9, 10}) == "0, 2-4, 9, 10");
  std::vector<int> odd;
  for (int i = 1; i < 2000; i += 2) odd.push_back(i);
  CHECK(format_ranks(odd).size() < 200);
  CHECK(format_ranks(odd).ends_with("37, 39 and 980 more"));
}

TEST_CASE("a page on many ranks without records is short, and uses little memory") {
  const test::TempDir dir;
  const std::filesystem::path run = dir.path() / "run";
  std::filesystem::create_directories(run / "flight");
  std::filesystem::create_directories(run / "logs");
  constexpr int kWorld = 65'536;
  for (const int rank : {0, 7, 60'000}) {
    comm::FlightRecorder::create(run / "flight" / comm::flight_file_name(rank),
                                 {.rank = rank, .world_size = kWorld, .start_id = 1})
        ->set_phase("step", 1);
  }
  const auto found = gather_evidence(run);
  CHECK(found.ranks.size() == kWorld);
  CHECK(found.problems.size() < 30);
  const Verdict verdict = judge_run(found.ranks, kNow);
  const std::string text = render_text(found, verdict, kNow, {});
  INFO(text);
  CHECK(text.size() < 20'000);
  CHECK(std::ranges::count(text, '\n') < 60);
  for (const char* part : {"1-6 ", "8-59999 ", "60001-65535 "}) CHECK(test::holds(text, part));

  // Beyond any run's size: the record is malformed.
  std::string bytes = dir.read("run/flight/rank-60000.bin");
  const std::int32_t huge = 0x7fffffff;
  std::memcpy(bytes.data() + 28, &huge, sizeof(huge));
  for (const char* name : {"rank-00000.bin", "rank-00007.bin"}) {
    std::filesystem::remove(run / "flight" / name);
  }
  dir.write("run/flight/rank-60000.bin", bytes);
  const auto corrupt = gather_evidence(run);
  CHECK(corrupt.ranks.empty());
  REQUIRE(corrupt.problems.size() >= 1);
  CHECK(corrupt.problems[0].find("rank 60000 of 2147483647") != std::string::npos);
}

TEST_CASE("records of another start are ignored, even if all else is equal") {
  const test::TempDir dir;
  const std::filesystem::path run = dir.path() / "run";
  std::filesystem::create_directories(run / "flight");
  const auto leave = [&](int rank, std::uint64_t start, const char* text) {
    comm::FlightRecorder::create(
        run / "flight" / comm::flight_file_name(rank),
        {.rank = rank, .world_size = 3, .run_id = "host:1", .start_id = start})
        ->end(FlightEnd::Error, text);
  };
  const auto gather = [&] {
    std::vector<std::string> texts;
    for (const RankEvidence& rank : gather_evidence(run).ranks) {
      texts.push_back(rank.record ? rank.record->end_text : rank.problem);
    }
    return texts;
  };
  const std::string other = "no record of this start: the file is from another start";
  leave(1, 1, "old");
  leave(0, 2, "new");
  leave(2, 2, "new, too");
  CHECK(gather() == std::vector<std::string>{"new", other, "new, too"});
  // Records of unmet ranks: only the newest surely belongs to the newest start.
  leave(1, 0, "alone");
  CHECK(gather() == std::vector<std::string>{other, "alone", other});
  leave(2, 0, "alone, too");
  CHECK(gather() == std::vector<std::string>{other, other, "alone, too"});
}

TEST_CASE("the page begins with the verdict, and ends with advice") {
  Run made(3, ProcessState::Gone);
  for (const int r : {0, 1}) made.end(r, FlightEnd::PeerLost, 2, "lost rank 2");
  RunEvidence run;
  run.directory = "runs/it's";
  run.ranks = made.ranks;
  run.has_config = true;
  run.checkpoint = "runs/a/checkpoints/step-00000010";
  run.checkpoint_step = 10;
  run.log_tails[2] = {"start at step 0"};
  run.problems = {"runs/a/metrics.jsonl: gone"};
  const Verdict verdict = made.judge();
  const std::string text = render_text(run, verdict, kNow, {});
  INFO(text);
  CHECK(text.starts_with(verdict.headline));
  constexpr const char* kGoOn =
      "resume from step 10: the same command again, or tessera train --nproc 3 "
      "'runs/it'\\''s/config.json'";
  for (const char* part :
       {"here, 102  KILLED", "peer lost", "step, 12", "all_gather#7 (h.1) f32[64] done, 98.0 s ago",
        "step 10, runs/a", "start at step 0", "dmesg", "runs/a/metrics.jsonl: gone", kGoOn}) {
    CHECK(test::holds(text, part));
  }
  const auto json = render_json(run, verdict, kNow);
  CHECK(json.at("state") == "killed");
  CHECK(json.at("culprits") == std::vector{2});
  CHECK(json.at("ranks").at(2).at("end") == "running");
  CHECK(json.at("ranks").at(2).at("last").at("sequence") == 7);
  CHECK(json.at("checkpoint").at("step") == 10);
}

TEST_CASE("a directory is read as far as possible, with its problems listed") {
  const test::TempDir dir;
  const std::filesystem::path run = dir.path() / "run";
  CHECK_THROWS_HOLDING(IoError, "is not a directory", gather_evidence(run));
  std::filesystem::create_directories(run / "flight");
  std::filesystem::create_directories(run / "logs");
  const auto empty = gather_evidence(run);
  CHECK(empty.ranks.empty());
  CHECK(empty.checkpoint_step == -1);

  const auto recorder =
      comm::FlightRecorder::create(run / "flight" / "rank-00000.bin", {.world_size = 3});
  recorder->set_phase("step", 4);
  dir.write("run/flight/rank-00001.bin", "garbage");
  dir.write("run/flight/rank-00077.bin.tmp", "no record");
  dir.write("run/metrics.jsonl",
            "{\"step\":3,\"loss\":2.5}\n{\"step\":3,\"val_loss\":9}\n{\"step\":4,\"lo");
  dir.write("run/logs/rank-0.log", "first\nsecond\x1b[2J\n");
  const auto found = gather_evidence(run);
  REQUIRE(found.ranks.size() == 3);
  CHECK(found.ranks[0].process == ProcessState::Running);
  CHECK(found.ranks[1].problem == "the record can't be read");
  CHECK(found.ranks[2].problem.starts_with("no record"));
  CHECK(found.last_step == 3);
  CHECK(found.last_loss == 2.5);
  CHECK(found.log_tails.at(0) == std::vector<std::string>{"first", "second\\x1b[2J"});
  const auto says = [&](std::string_view part) {
    return test::holds(fmt::format("{}", fmt::join(found.problems, "\n")), part);
  };
  CHECK(says("rank-00001.bin: has 7 bytes"));
  CHECK(says("logs/rank-1.log"));
  CHECK_THROWS_HOLDING(IoError, "is not a run", gather_evidence(run / "logs"));
}

TEST_CASE("a reused process id does not count as the rank's process") {
  test::Processes child(1, [](int, const std::string&) {
    ::pause();
    return std::string();
  });
  child.go("x");
  comm::FlightRecord record = comm::FlightRecorder::create({}, {})->snapshot();
  CHECK(look_at(record) == ProcessState::Running);
  record.pid = child.pid(0);
  record.pid_start = comm::look_at_process(record.pid).start + 1;
  CHECK(look_at(record) == ProcessState::Gone);
  record.pid_start -= 1;
  CHECK(look_at(record) == ProcessState::Running);
  child.signal(0, SIGSTOP);
  for (int i = 0; i < 5000 && look_at(record) != ProcessState::Stopped; ++i) ::usleep(2000);
  CHECK(look_at(record) == ProcessState::Stopped);
  child.signal(0, SIGKILL);
  child.wait(std::chrono::seconds(10));
  CHECK(look_at(record) == ProcessState::Gone);
  record.boot_id = "another host";
  CHECK(look_at(record) == ProcessState::Unknown);
}
