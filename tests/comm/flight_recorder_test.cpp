// The flight recorder's file: a rank's last collectives, readable after any kind of exit.
#include "comm/flight_recorder.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <thread>

#include "comm/flight_layout.h"
#include "comm/threads.h"
#include "core/base/tensor_view.h"
#include "tests/support/check_throws.h"
#include "tests/support/multiprocess.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace std::chrono_literals;
using comm::Collective;
using comm::CollectiveKind;
using comm::CorruptRecord;
using comm::FlightEnd;
using comm::FlightEntry;
using comm::FlightHeader;
using comm::FlightRecord;
using comm::FlightRecorder;
using comm::FlightState;
using test::TempDir;

namespace {

namespace fs = std::filesystem;

Collective all_gather(std::uint64_t sequence, std::int64_t count = 1024) {
  Collective c;
  c.kind = CollectiveKind::AllGather;
  c.dtype = DType::F32;
  c.count = count;
  c.sequence = sequence;
  c.label = "h." + std::to_string(sequence % 12);
  return c;
}

struct Fixture {
  TempDir dir;
  std::string path = dir.file("flight/rank-00002.bin");

  std::shared_ptr<FlightRecorder> create() const {
    return FlightRecorder::create(path, {.rank = 2, .world_size = 3, .run_id = "run"});
  }
};

std::string holds(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos ? "" : "no \"" + std::string(part) + "\" in " + text;
}

}  // namespace

TEST_CASE_FIXTURE(Fixture, "a record contains rank, process, collectives and their outcomes") {
  const auto recorder = create();
  CHECK(recorder->why_not_in_file() == "");
  CHECK(fs::file_size(path) == comm::kFlightBytes);
  CHECK_FALSE(fs::exists(path + ".tmp"));
  {
    const FlightRecord record = comm::read_flight_record(path);
    CHECK(record.rank == 2);
    CHECK(record.world_size == 3);
    CHECK(record.run_id == "run");
    CHECK(record.pid == ::getpid());
    CHECK(record.pid_start == comm::look_at_process(::getpid()).start);
    CHECK(record.pid_start > 0);
    CHECK(record.boot_id == comm::this_boot_id());
    CHECK(record.phase == "");
    CHECK(record.end == FlightEnd::Running);
    CHECK(record.collectives.empty());
    CHECK(record.newest_started() == nullptr);
  }
  recorder->set_phase("step", 7);
  for (std::uint64_t i = 0; i < 4; ++i) recorder->queued(all_gather(i));
  recorder->started(0);
  recorder->ended(0, true);
  recorder->started(1);
  recorder->ended(1, false);
  recorder->started(2);
  recorder->end(CommError(CommFailure::PeerLost, {1}, "lost rank {}", 1));
  recorder->end(FlightEnd::Error, "this comes too late");

  const FlightRecord record = comm::read_flight_record(path);
  CHECK(record.phase == "step");
  CHECK(record.step == 7);
  CHECK(record.end == FlightEnd::PeerLost);
  CHECK(record.end_culprit == 1);
  CHECK(record.end_text == "lost rank 1");
  CHECK(record.end_ns >= record.phase_entered_ns);
  REQUIRE(record.collectives.size() == 4);
  const FlightState states[] = {FlightState::Done, FlightState::Failed, FlightState::Running,
                                FlightState::Queued};
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(record.collectives[i].state == states[i]);
    CHECK(record.collectives[i].signature == comm::Signature(all_gather(i)));
    CHECK(record.collectives[i].bytes == 4096);
  }
  CHECK(record.collectives[0].started_ns >= record.collectives[0].queued_ns);
  CHECK(record.collectives[0].ended_ns >= record.collectives[0].started_ns);
  CHECK(record.newest_started()->signature.sequence == 2);
  CHECK(record.unreadable == 0);

  const std::string text = comm::describe(record, 3);
  CHECK(holds(text, "rank 2 of 3 (") == "");
  CHECK(holds(text, "phase step, step 7") == "");
  CHECK(holds(text, "ended, peer lost: lost rank 1") == "");
  CHECK(holds(text, "all_gather#2 (h.2) f32[1024]: running") == "");
  CHECK(holds(text, "all_gather#1 (h.1) f32[1024]: failed after") == "");
  CHECK(text.find("all_gather#0") == std::string::npos);
}

TEST_CASE_FIXTURE(Fixture,
                  "the last 1000 collectives are kept; updates of older numbers are ignored") {
  const auto recorder = create();
  for (std::uint64_t i = 0; i < 2345; ++i) {
    recorder->queued(all_gather(i));
    recorder->started(i);
    recorder->ended(i, true);
  }
  recorder->ended(7, false);     // overwritten by 2007
  recorder->started(1'000'000);  // never queued
  const FlightRecord record = comm::read_flight_record(path);
  REQUIRE(record.collectives.size() == 1000);
  for (std::size_t i = 0; i < 1000; ++i) {
    REQUIRE(record.collectives[i].signature.sequence == 1345 + i);
    REQUIRE(record.collectives[i].state == FlightState::Done);
  }
}

TEST_CASE_FIXTURE(Fixture, "long texts are truncated, and control characters are escaped") {
  const auto recorder = create();
  recorder->set_phase(std::string(100, 'p'), -1);
  Collective c = all_gather(0);
  c.label = "\x1b[2J" + std::string(100, 'l');
  recorder->queued(c);
  recorder->end(FlightEnd::Error, "first\nsecond\x1b[2J" + std::string(1000, 'e'));
  const FlightRecord record = comm::read_flight_record(path);
  CHECK(record.phase == std::string(31, 'p'));
  CHECK(record.end_text.size() == 400);
  CHECK(record.end_text.starts_with("first second?[2J"));
  CHECK(comm::describe(record, 1).find('\x1b') == std::string::npos);
}

TEST_CASE_FIXTURE(Fixture, "a concurrent reader sees no torn entries") {
  const auto recorder = create();
  std::atomic<bool> stop = false;
  // Each collective's count and label follow from its number.
  std::thread writer([&] {
    for (std::uint64_t i = 0; !stop; ++i) {
      recorder->set_phase(i % 2 == 0 ? "even" : "odd", static_cast<std::int64_t>(i));
      recorder->queued(all_gather(i, static_cast<std::int64_t>(i) * 3));
      recorder->started(i);
      recorder->ended(i, true);
    }
  });
  std::size_t seen = 0;
  const auto end = std::chrono::steady_clock::now() + 20s;
  for (int round = 0; round < 200 && std::chrono::steady_clock::now() < end; ++round) {
    const FlightRecord record =
        round % 2 == 0 ? comm::read_flight_record(path) : recorder->snapshot();
    seen += record.collectives.size();
    for (const auto& c : record.collectives) {
      const auto number = static_cast<std::int64_t>(c.signature.sequence);
      REQUIRE(c.signature == comm::Signature(all_gather(c.signature.sequence, number * 3)));
      REQUIRE(c.bytes == static_cast<std::uint64_t>(number) * 12);
      REQUIRE((c.ended_ns != 0) == (c.state == FlightState::Done));
    }
    if (!record.phase.empty()) REQUIRE(record.phase == (record.step % 2 == 0 ? "even" : "odd"));
  }
  stop = true;
  writer.join();
  CHECK(seen > 0);
  CHECK(comm::read_flight_record(path).unreadable == 0);
}

TEST_CASE_FIXTURE(Fixture, "a queue records which works finished, failed, or never ran") {
  auto group = std::make_shared<comm::ThreadGroup>(2);
  const auto recorder = create();
  const auto mine = comm::make_threads_communicator(group, 0, {.timeout = 20s});
  auto peer = comm::make_threads_communicator(group, 1, {.timeout = 20s});
  mine->set_recorder(recorder);
  const auto done = mine->start_barrier({.label = "done"});
  peer->barrier({.label = "done"});
  done->wait();
  const auto failing = mine->start_barrier({.label = "failing"});
  const auto waiting = mine->start_barrier({.label = "waiting"});
  peer.reset();
  CHECK_THROWS_AS(failing->wait(), CommError);
  CHECK_THROWS_AS(waiting->wait(), CommError);
  const FlightRecord record = comm::read_flight_record(path);
  REQUIRE(record.collectives.size() == 3);
  CHECK(record.collectives[0].state == FlightState::Done);
  CHECK(record.collectives[1].state == FlightState::Failed);
  CHECK(record.collectives[1].started_ns != 0);
  CHECK(record.collectives[2].state == FlightState::Failed);
  CHECK(record.collectives[2].started_ns == 0);
}

TEST_CASE_FIXTURE(Fixture, "collectives of subgroups are recorded with their group's name") {
  const auto recorder = create();
  const auto of_group = [](int i) {
    Collective c = all_gather(0);
    c.group = std::make_shared<comm::Subgroup>(
        comm::Subgroup{"shard", {i, i + 1}, "shm/" + std::to_string(i)});
    return c;
  };
  for (const int group : {0, 1, 2, 3, 4, 5, 6, 0}) recorder->queued(of_group(group));
  recorder->queued(all_gather(0));
  recorder->started(1);
  recorder->started(8);
  recorder->ended(8, true);
  const FlightRecord record = comm::read_flight_record(path);
  REQUIRE(record.collectives.size() == 9);
  CHECK(record.collectives[1].describe() ==
        "all_gather#0 (h.0) f32[1024] of the shard group of ranks 1, 2");
  CHECK(record.collectives[0].group == record.collectives[7].group);
  CHECK(record.collectives[0].group != record.collectives[1].group);
  CHECK(record.collectives[6].group_name == "another group");  // the header names six
  CHECK(record.collectives[8].describe() == "all_gather#0 (h.0) f32[1024]");
  CHECK(record.newest_started()->number == 1);  // still running
  CHECK(holds(comm::describe(record, 9), "of the shard group of ranks 5, 6: queued") == "");
}

TEST_CASE_FIXTURE(Fixture, "records of version 1, without groups, are read") {
  const auto recorder = create();
  for (std::uint64_t i = 0; i < 3; ++i) recorder->queued(all_gather(i));
  std::string bytes = dir.read("flight/rank-00002.bin");
  bytes[offsetof(FlightHeader, version)] = 1;
  for (std::size_t i = 0; i < 3; ++i) {
    bytes[comm::entry_offset(i) + offsetof(FlightEntry, number)] = 0;
  }
  const FlightRecord record = comm::read_flight_record(dir.write("old.bin", bytes));
  REQUIRE(record.collectives.size() == 3);
  CHECK(record.collectives[2].number == 2);
  CHECK(record.unreadable == 0);
}

TEST_CASE_FIXTURE(
    Fixture, "an entry that was being written when its rank was killed is skipped, and no other") {
  const auto recorder = create();
  for (std::uint64_t i = 0; i < 3; ++i) recorder->queued(all_gather(i));
  std::string bytes = dir.read("flight/rank-00002.bin");
  bytes[sizeof(FlightHeader) + sizeof(FlightEntry)] += 1;  // the entry's version
  const auto path2 = dir.write("torn.bin", bytes);
  const FlightRecord record = comm::read_flight_record(path2);
  CHECK(record.unreadable == 1);
  REQUIRE(record.collectives.size() == 2);
  CHECK(record.collectives[1].signature.sequence == 2);
}

TEST_CASE_FIXTURE(Fixture, "an earlier run's file is replaced, and links are not followed") {
  fs::create_directories(dir.path() / "flight");
  const std::string other = dir.write("other", "keep me");
  fs::create_symlink(other, path);
  fs::create_symlink(other, path + ".tmp");
  {
    const auto recorder = create();
    CHECK(recorder->why_not_in_file() == "");
    recorder->queued(all_gather(0));
  }
  CHECK(dir.read("other") == "keep me");
  CHECK(fs::is_regular_file(fs::symlink_status(path)));
  CHECK(comm::read_flight_record(path).collectives.size() == 1);
  const auto again = create();
  CHECK(comm::read_flight_record(path).collectives.empty());

  fs::remove(path);
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  CHECK_THROWS_HOLDING(CorruptRecord, "not a regular file", comm::read_flight_record(path));
  CHECK(create()->why_not_in_file() == "");
  CHECK(comm::read_flight_record(path).rank == 2);
}

TEST_CASE_FIXTURE(Fixture, "data common to all ranks of a start are written once they are known") {
  const auto recorder = create();
  CHECK(comm::read_flight_record(path).start_id == 0);
  recorder->set_start_id(77);
  recorder->set_start_id(78);
  CHECK(comm::read_flight_record(path).start_id == 77);
  CHECK(FlightRecorder::create({}, {.start_id = 5})->snapshot().start_id == 5);
}

TEST_CASE_FIXTURE(Fixture, "a recorder detects whether its file is still in place") {
  const auto first = create();
  CHECK(first->is_in_place());
  const auto second = create();
  CHECK_FALSE(first->is_in_place());
  CHECK(second->is_in_place());
  first->end(FlightEnd::Done, "in no file");
  CHECK(comm::read_flight_record(path).end == FlightEnd::Running);
  fs::remove(path);
  CHECK_FALSE(second->is_in_place());
  CHECK_FALSE(FlightRecorder::create({}, {})->is_in_place());
}

TEST_CASE("each rank's file name is unique") {
  for (const int rank : {0, 3, 99'999, 123'456}) {
    CHECK(comm::rank_of_flight_file(comm::flight_file_name(rank)) == rank);
  }
  for (const char* name :
       {"rank-3.bin", "rank-000003.bin", "rank-00003.bin.tmp", "rank-00003", "rank-.bin",
        "rank--0003.bin", "rank-00003x.bin", "rank-99999999999.bin", "xrank-00003.bin", ""}) {
    INFO(name);
    CHECK_FALSE(comm::rank_of_flight_file(name).has_value());
  }
}

TEST_CASE_FIXTURE(Fixture, "without a file, the recorder uses memory and says why") {
  const auto expect_memory = [](const FlightRecorder& recorder, std::string_view why) {
    CHECK(holds(recorder.why_not_in_file(), why) == "");
  };
  dir.write("file", "");
  const auto in_file = FlightRecorder::create(dir.path() / "file" / "rank-00000.bin", {});
  expect_memory(*in_file, "cannot open");
  in_file->queued(all_gather(5));
  CHECK(in_file->snapshot().collectives.size() == 1);
  expect_memory(*FlightRecorder::create(dir.path() / "absent" / "flight" / "rank-00000.bin", {}),
                "No such file");
  fs::create_directories(dir.path() / "elsewhere");
  fs::create_symlink(dir.path() / "elsewhere", dir.path() / "link");
  expect_memory(*FlightRecorder::create(dir.path() / "link" / "rank-00000.bin", {}), "cannot open");
  fs::create_directories(path);
  expect_memory(*create(), "cannot replace");
  CHECK_FALSE(fs::exists(path + ".tmp"));
  CHECK(FlightRecorder::create({}, {})->why_not_in_file() == "");
}

TEST_CASE_FIXTURE(Fixture, "a full disk is reported when the file is created") {
  test::Processes ranks(1, [&](int, const std::string&) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const auto recorder = create();
    recorder->queued(all_gather(0));
    return recorder->why_not_in_file();
  });
  ranks.go("x");
  const auto outcome = ranks.wait(20s)[0];
  CHECK(outcome.exit_code == 0);
  CHECK(holds(outcome.text, "no room for " + path) == "");
  CHECK_FALSE(fs::exists(path));
  CHECK_FALSE(fs::exists(path + ".tmp"));
}

TEST_CASE_FIXTURE(Fixture, "each kind of malformed file has its own error") {
  const auto recorder = create();
  recorder->queued(all_gather(0));
  const std::string good = dir.read("flight/rank-00002.bin");
  const auto read = [&](const std::string& bytes) {
    return comm::read_flight_record(dir.write("bad.bin", bytes));
  };
  const auto with = [&](std::size_t offset, auto value) {
    std::string bytes = good;
    std::memcpy(bytes.data() + offset, &value, sizeof(value));
    return bytes;
  };
  CHECK(read(good).collectives.size() == 1);
  CHECK_THROWS_HOLDING(IoError, "absent.bin", comm::read_flight_record(dir.file("absent.bin")));
  CHECK_THROWS_HOLDING(CorruptRecord, "not a regular file", comm::read_flight_record(dir.path()));
  fs::create_symlink(path, dir.file("link.bin"));
  CHECK_THROWS_HOLDING(IoError, "link.bin", comm::read_flight_record(dir.file("link.bin")));
  CHECK_THROWS_HOLDING(CorruptRecord, "has 0 bytes", read(""));
  CHECK_THROWS_HOLDING(CorruptRecord, "less than the header", read(good.substr(0, 1023)));
  CHECK_THROWS_HOLDING(CorruptRecord, "truncated or overwritten",
                       read(good.substr(0, good.size() - 1)));
  CHECK_THROWS_HOLDING(CorruptRecord, "truncated or overwritten", read(good + "x"));
  CHECK_THROWS_HOLDING(CorruptRecord, "not a tessera flight record",
                       read(std::string(good.size(), 'x')));
  CHECK_THROWS_HOLDING(CorruptRecord, "not a tessera flight record", read(std::string(2000, '\0')));
  CHECK_THROWS_HOLDING(Unsupported, "version 9", read(with(8, std::uint32_t{9})));
  CHECK_THROWS_HOLDING(Unsupported, "version 9",
                       read(with(8, std::uint32_t{9}).substr(0, 5000)));  // another file size
  CHECK_THROWS_HOLDING(CorruptRecord, "version 0", read(with(8, std::uint32_t{0})));
  CHECK_THROWS_HOLDING(CorruptRecord, "4000000000 entries",
                       read(with(16, std::uint32_t{4'000'000'000})));
  CHECK_THROWS_HOLDING(CorruptRecord, "rank 3 of 3", read(with(24, std::int32_t{3})));
  CHECK_THROWS_HOLDING(CorruptRecord, "rank 2 of 2147483647",
                       read(with(28, std::numeric_limits<std::int32_t>::max())));
  CHECK(read(with(28, std::int32_t{65'536})).world_size == 65'536);
  CHECK_THROWS_HOLDING(CorruptRecord, "rank -1 of", read(with(24, std::int32_t{-1})));
  CHECK_THROWS_HOLDING(CorruptRecord, "invalid start time", read(with(56, std::int64_t{-5})));
  constexpr std::size_t kKind = offsetof(FlightHeader, ending) + offsetof(comm::FlightEnding, kind);
  CHECK_THROWS_HOLDING(CorruptRecord, "unknown end kind 77", read(with(kKind, std::uint64_t{77})));

  // A damaged entry invalidates only itself.
  constexpr std::size_t kEntry = sizeof(FlightHeader);
  constexpr std::size_t kSignature = kEntry + offsetof(FlightEntry, signature);
  for (const std::string& bytes :
       {with(kEntry + offsetof(FlightEntry, number), std::uint64_t{1}),
        with(kEntry + offsetof(FlightEntry, state), 99),
        with(kSignature + offsetof(comm::Signature, dtype), std::uint8_t{200}),
        with(kSignature + offsetof(comm::Signature, kind), std::uint8_t{200}),
        with(kEntry + offsetof(FlightEntry, started_ns), std::int64_t{-1})}) {
    CHECK(read(bytes).unreadable == 1);
    CHECK(read(bytes).collectives.empty());
  }
  std::string garbage = good;
  for (std::size_t i = kEntry; i < garbage.size(); ++i) {
    garbage[i] = static_cast<char>(i * 2654435761U >> 13);
  }
  CHECK(comm::describe(read(garbage), 1000).size() < 200'000);
}
