// Heartbeats: which silent ranks are blamed, and how soon all ranks know.

#include "comm/control/monitor.h"

#include <doctest/doctest.h>

#include <atomic>
#include <map>
#include <thread>

#include "comm/control/agreement.h"
#include "comm/control/heartbeat.h"
#include "comm/control/tcp_store.h"
#include "comm/control/withheld_time.h"

using namespace tessera;
using namespace tessera::comm;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

RankState state(const std::string& process, const std::string& phase, std::int64_t step) {
  RankState result;
  result.process = process;
  result.phase = phase;
  result.step = step;
  return result;
}

std::map<int, Beat> three_ranks(Clock::time_point at) {
  std::map<int, Beat> beats;
  for (int rank = 0; rank < 3; ++rank)
    beats[rank] = {at, 0, std::nullopt, state("here, pid " + std::to_string(10 + rank), "step", 7)};
  return beats;
}

template <typename F>
bool soon(F&& condition, std::chrono::milliseconds limit = 10s) {
  const auto end = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

}  // namespace

TEST_CASE("a state survives its encoding") {
  RankState before = state("a host, pid 3", "save", 12);
  before.collective = "all_gather#88 (h.3)";
  before.busy_us = 1234567;
  before.busy_steps = 9;
  before.leaving = true;
  const auto after = RankState::decode(before.encode());
  REQUIRE(after);
  CHECK(after->process == before.process);
  CHECK(after->where() == "save of step 12, all_gather#88 (h.3)");
  CHECK(after->busy_us == 1234567);
  CHECK(after->busy_steps == 9);
  CHECK(after->leaving);
  CHECK_FALSE(RankState::decode(""));
  CHECK_FALSE(RankState::decode("B"));
  CHECK_FALSE(RankState::decode(before.encode().substr(1)));
  CHECK_FALSE(RankState::decode(before.encode() + "x"));
}

TEST_CASE("all silent ranks are blamed together, none before the time limit") {
  const auto start = Clock::now();
  auto beats = three_ranks(start);
  const MonitorOptions options;
  CHECK_FALSE(judge_beats(beats, start + 3900ms, options));
  beats[0].at = start + 3s;
  const auto error = judge_beats(beats, start + 4s, options);
  REQUIRE(error);
  CHECK(error->failure() == CommFailure::Timeout);
  CHECK(error->culprits() == std::vector<int>{1, 2});
  CHECK(error->fate() == "stopped");
  CHECK(std::string(error->what()).find("rank 1 (here, pid 11), rank 2 (here, pid 12)") !=
        std::string::npos);
  CHECK(std::string(error->what()).find("last seen in step 7") != std::string::npos);

  MonitorOptions never;
  never.silence = 0ms;
  CHECK_FALSE(judge_beats(beats, start + 1h, never));
}

TEST_CASE("a rank that leaves in order is not blamed; one that disconnects without a word is") {
  const auto start = Clock::now();
  auto beats = three_ranks(start);
  beats[1].broken = start;
  beats[1].state.leaving = true;
  beats[0].at = beats[2].at = start + 1h;
  CHECK_FALSE(judge_beats(beats, start + 1h, {}));
  beats[2].broken = start + 1h;
  CHECK_FALSE(judge_beats(beats, start + 1h + 1400ms, {}));
  const auto error = judge_beats(beats, start + 1h + 1600ms, {});
  REQUIRE(error);
  CHECK(error->failure() == CommFailure::PeerLost);
  CHECK(error->culprits() == std::vector<int>{2});
}

TEST_CASE("only the slowest rank is reported, once a minute") {
  MonitorOptions options;
  options.slow_window = 5s;
  SlowRanks slow(options);
  auto now = Clock::now();
  auto beats = three_ranks(now);
  const auto work = [&](std::int64_t us0, std::int64_t us1, std::int64_t us2, std::int64_t steps) {
    const std::int64_t us[] = {us0, us1, us2};
    for (int rank = 0; rank < 3; ++rank) {
      beats[rank].state.busy_us += us[rank] * steps;
      beats[rank].state.busy_steps += steps;
    }
    now += 5s;
    return slow.look(beats, now);
  };
  CHECK(slow.look(beats, now).empty());
  CHECK(work(100'000, 120'000, 290'000, 10).empty());  // less than three times the median
  const auto notes = work(100'000, 120'000, 400'000, 10);
  REQUIRE(notes.size() == 1);
  CHECK(notes[0].find("rank 2 (here, pid 12) is slow") == 0);
  CHECK(notes[0].find("3.3 times the median of 0.12 s") != std::string::npos);
  CHECK(work(100'000, 120'000, 400'000, 10).empty());  // already reported
  CHECK(work(1'000, 1'200, 9'000, 10).empty());        // too little time to matter
  CHECK(work(100'000, 120'000, 400'000, 2).empty());   // too few steps
  now += 60s;
  work(1'000, 1'000, 1'000, 10);
  CHECK(work(100'000, 120'000, 400'000, 10).size() == 1);
}

TEST_CASE("a rank whose heartbeats stop is reported to all others, and their waits end") {
  const std::string token = "what only these ranks know";
  TcpStoreServer server({.run_id = "a", .token = token});
  MonitorOptions options;
  options.silence = 600ms;
  std::atomic<int> verdicts{0};
  const auto connect = [&] {
    return std::make_shared<TcpStore>(server.host(), server.port(), "a", 5s, 1, token);
  };
  HeartbeatOptions heartbeat;
  heartbeat.period = 100ms;
  heartbeat.leave_within = 1h;
  std::vector<std::shared_ptr<RankStatus>> status;
  for (int rank = 0; rank < 3; ++rank) {
    status.push_back(std::make_shared<RankStatus>("here, pid " + std::to_string(rank)));
    status.back()->enter("step", 5);
  }
  std::atomic<int> told{0};
  heartbeat.on_verdict = [&](const CommError& error) {
    if (error.culprits() == std::vector<int>{2} && error.failure() == CommFailure::Timeout) ++told;
  };
  Heartbeat zero(connect(), 0, status[0], heartbeat), one(connect(), 1, status[1], heartbeat);
  // Rank 2 sends one heartbeat and keeps its connection.
  TcpStore silent(server.host(), server.port(), "a", 5s, 1, token);
  silent.beat(2, status[2]->state());
  REQUIRE(soon([&] { return server.beats().all().size() == 3; }));
  Monitor monitor(
      server, options, [&](const CommError&) { ++verdicts; }, nullptr);
  CHECK(soon([&] { return told == 2; }));
  CHECK(soon([&] { return verdicts == 1; }));
  // A pending agreement ends with the same message.
  TcpStore waiting(server.host(), server.port(), "a", 5s, 1, token);
  CHECK_THROWS_WITH_AS(exchange(waiting, "loaded", 0, 3, "", 1h),
                       doctest::Contains("no heartbeat of rank 2"), CommError);
  CHECK_THROWS_WITH_AS(get_or_verdict(waiting, "nothing", 1h),
                       doctest::Contains("no heartbeat of rank 2"), CommError);
}

TEST_CASE("time withheld from the whole host does not count as silence") {
  const auto start = Clock::now();
  CHECK(WithheldTime(100ms, start).look(start + 6000ms) >= 5800ms);  // before its first look
  WithheldTime withheld(100ms, start);
  CHECK(withheld.look(start) == 0ms);
  CHECK(withheld.look(start + 100ms) == 0ms);
  CHECK(withheld.look(start + 110ms) == 0ms);
  CHECK(withheld.look(start + 6110ms) >= 5800ms);
  CHECK(withheld.look(start + 6110ms) == 0ms);

  // The host sleeps for a minute; before, rank 2 was silent for 3 s and rank 1's connection broke.
  const MonitorOptions options;
  auto beats = three_ranks(start + 3s);
  beats[2].at = start;
  beats[1].broken = start + 3s;
  CHECK_FALSE(judge_beats(beats, start + 3s, options));
  grant(beats, 60s, start + 63s);
  CHECK_FALSE(judge_beats(beats, start + 63900ms, options));
  beats[0].at = beats[1].at = start + 63900ms;
  beats[1].broken.reset();
  const auto silent = judge_beats(beats, start + 64100ms, options);
  REQUIRE(silent);
  CHECK(silent->culprits() == std::vector<int>{2});
  // Time withheld before a heartbeat does not count.
  beats[2].at = start + 64s;
  grant(beats, 500ms, start + 64200ms);
  CHECK(beats[2].at == start + 64200ms);
}

TEST_CASE("connections that broke while the monitor was stopped are not blamed on the ranks") {
  const auto now = Clock::now();
  MonitorOptions options;
  options.server = {{0}, "rank 0 (here, pid 1)"};
  auto beats = three_ranks(now);
  beats[1].broken = now - 2s;
  const auto lost = judge_beats(beats, now, options);
  REQUIRE(lost);
  OwnStop own(options);
  CHECK(own.judge(*lost, beats, now).culprits() == std::vector<int>{1});
  own.look(3400ms, now);  // within the ranks' patience
  CHECK(own.judge(*lost, beats, now).culprits() == std::vector<int>{1});
  own.look(5200ms, now);
  const CommError ours = own.judge(*lost, beats, now + 4s);
  CHECK(ours.culprits() == std::vector<int>{0});
  CHECK(ours.fate() == kNoAnswer);
  CHECK(std::string(ours.what()) ==
        "rank 0 (here, pid 1) was stopped for 5.2 s, and the ranks gave up waiting");
  CHECK(own.judge(*lost, beats, now + 5s).culprits() == std::vector<int>{1});  // too long ago
  // A rank that arrived after the stop cannot have given up because of it.
  beats[1].arrived = now + 1s;
  CHECK(own.judge(*lost, beats, now + 4s).culprits() == std::vector<int>{1});
  // Silent ranks are blamed all the same: the monitor receives heartbeats again.
  beats = three_ranks(now - 10s);
  const auto silent = judge_beats(beats, now, options);
  REQUIRE(silent);
  CHECK(own.judge(*silent, beats, now).culprits() == std::vector<int>{0, 1, 2});
}

TEST_CASE("a rank that has reconnected is not lost with its former connection") {
  BeatTable table;
  table.beat(3, state("here, pid 3", "step", 1), 7);
  table.beat(3, state("here, pid 3", "step", 2), 8);
  table.broken(3, 7);  // detected late
  CHECK_FALSE(table.all().at(3).broken);
  table.broken(3, 8);
  CHECK(table.all().at(3).broken);
  table.beat(3, state("here, pid 3", "step", 3), 9);
  CHECK_FALSE(table.all().at(3).broken);
}

TEST_CASE("a rank whose connection breaks is lost, unless it announced that it leaves") {
  TcpStoreServer server({});
  std::optional<CommError> verdict;
  std::atomic<bool> done{false};
  Monitor monitor(
      server, {},
      [&](const CommError& error) {
        verdict = error;
        done = true;
      },
      nullptr);
  const auto connect = [&] {
    return std::make_shared<TcpStore>(server.host(), server.port(), "", 5s);
  };
  { const Heartbeat leaves(connect(), 0, std::make_shared<RankStatus>("here, pid 1"), {}); }
  REQUIRE(soon([&] { return server.beats().all().size() == 1; }));
  connect()->beat(1, state("here, pid 2", "load", 0));
  REQUIRE(soon([&] { return done.load(); }));
  CHECK(verdict->culprits() == std::vector<int>{1});
  CHECK(verdict->failure() == CommFailure::PeerLost);
  CHECK(std::string(verdict->what()) ==
        "lost rank 1 (here, pid 2), which ended without notice during load of step 0");
}

TEST_CASE("a rank detects that the store's server is gone, and a stuck process is ended") {
  auto server = std::make_unique<TcpStoreServer>(TcpStoreServerOptions{});
  auto store = std::make_shared<TcpStore>(server->host(), server->port(), "", 5s);
  HeartbeatOptions options;
  options.server = {{0}, "rank 0 (there, pid 1)"};
  options.leave_within = 50ms;
  std::atomic<int> verdicts{0}, stuck{0};
  options.on_verdict = [&](const CommError& error) {
    if (error.culprits() == std::vector<int>{0} &&
        std::string(error.what()).find("rank 0 (there, pid 1), which serves it") !=
            std::string::npos)
      ++verdicts;
  };
  options.on_stuck = [&](const CommError&) { ++stuck; };
  const Heartbeat heartbeat(store, 1, std::make_shared<RankStatus>("here, pid 2"), options);
  REQUIRE(soon([&] { return server->beats().all().size() == 1; }));
  const auto gone = Clock::now();
  server.reset();
  CHECK(soon([&] { return stuck == 1; }));
  CHECK(Clock::now() - gone < 3s);
  CHECK(verdicts == 1);
}
