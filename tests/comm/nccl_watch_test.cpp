// Judgement of late collectives over NCCL, without device or clock.
#include <algorithm>

#include "comm/flight_recorder.h"
#include "comm/nccl/pending.h"
#include "comm/nccl/position.h"
#include "tests/comm/ranks.h"

using namespace tessera;
using namespace tessera::test;
using comm::Collective;
using comm::NcclItem;
using comm::NcclLaunch;
using comm::NcclPosition;

namespace {

class SetEvent final : public comm::NcclEvent {
 public:
  explicit SetEvent(std::shared_ptr<bool> set) : set_(std::move(set)) {}
  bool is_done() const override { return *set_; }

 private:
  std::shared_ptr<bool> set_;
};

class FailedEvent final : public comm::NcclEvent {
 public:
  bool is_done() const override { throw CudaError("the device is lost"); }
};

struct Queued {
  std::shared_ptr<NcclLaunch> launch = std::make_shared<NcclLaunch>();
  std::shared_ptr<bool> start = std::make_shared<bool>(false);
  std::shared_ptr<bool> done = std::make_shared<bool>(false);

  explicit Queued(std::uint64_t sequence, std::chrono::milliseconds deadline = 10s) {
    launch->items.push_back(std::make_shared<NcclItem>());
    launch->items.push_back(std::make_shared<NcclItem>());
    launch->collective.sequence = sequence;
    launch->collective.deadline = deadline;
    launch->start = std::make_shared<SetEvent>(start);
    launch->done = std::make_shared<SetEvent>(done);
  }
};

Collective all_gather(std::uint64_t sequence, std::string label = "h.1") {
  Collective c;
  c.kind = comm::CollectiveKind::AllGather;
  c.dtype = DType::F32;
  c.count = 64;
  c.sequence = sequence;
  c.label = std::move(label);
  c.deadline = 30s;
  return c;
}

NcclPosition at(const Collective& oldest, bool has_started = true) {
  NcclPosition position;
  position.called = oldest.sequence + 1;
  position.unfinished = 1;
  position.has_started = has_started ? 1 : 0;
  position.oldest = comm::Signature(oldest);
  return position;
}

NcclPosition idle(std::uint64_t called) {
  NcclPosition position;
  position.called = called;
  return position;
}

CommError judged(const comm::NcclSuspicion& suspicion,
                 const std::vector<std::optional<NcclPosition>>& positions) {
  const auto store = std::make_shared<comm::MemoryStore>();
  const comm::FailureReport report(store, "verdict", static_cast<int>(positions.size()),
                                   {"a, pid 1", "b, pid 2", "c, pid 3"});
  return comm::judge(suspicion, 0, positions, report, 2s);
}

}  // namespace

TEST_CASE("a deadline counts from when the device reaches the collective, not from the call") {
  const auto zero = NcclLaunch::Time();
  comm::PendingCollectives pending;
  const Queued first(0), second(1, 5s);
  pending.push(first.launch);
  pending.push(second.launch);
  CHECK(pending.advance(zero + 1h) == nullptr);  // the device is still busy with earlier work
  *first.start = true;
  CHECK(pending.advance(zero + 2h) == nullptr);
  CHECK(pending.advance(zero + 2h + 9999ms) == nullptr);
  CHECK(pending.advance(zero + 2h + 10s) == first.launch);
  *first.done = true;  // done, after its deadline
  CHECK(pending.advance(zero + 3h) == nullptr);
  CHECK(pending.oldest() == second.launch);
  CHECK_FALSE(second.launch->has_started);
  *second.start = true;
  CHECK(pending.advance(zero + 4h) == nullptr);
  CHECK(second.launch->has_started);
  CHECK(pending.advance(zero + 4h + 5s) == second.launch);
}

TEST_CASE("finished launches are removed in order, however late they are polled") {
  comm::PendingCollectives pending;
  std::vector<Queued> items;
  for (std::uint64_t i = 0; i < 5; ++i) {
    items.emplace_back(i, 1ms);
    *items.back().start = true;
    pending.push(items.back().launch);
  }
  for (std::size_t i : {0U, 1U, 2U, 4U}) *items[i].done = true;
  CHECK(pending.advance(NcclLaunch::Time() + 1h) == nullptr);  // first poll
  CHECK(pending.oldest() == items[3].launch);
  CHECK_FALSE(pending.all_waited());
  for (const std::size_t i : {3U, 4U}) {
    for (const auto& item : items[i].launch->items) {
      CHECK_FALSE(pending.all_waited());
      item->waited = true;
    }
  }
  CHECK(pending.all_waited());
  *items[3].done = true;
  CHECK(pending.advance(NcclLaunch::Time() + 2h) == nullptr);
  CHECK(pending.is_empty());
}

TEST_CASE("observed starts and ends on the device are recorded, and unfinished works") {
  const auto recorder = comm::FlightRecorder::create({}, {});
  comm::PendingCollectives pending;
  const Queued first(0), second(1), third(2);
  for (const Queued* queued : {&first, &second, &third}) {
    queued->launch->recorder = recorder;
    queued->launch->entry = recorder->queued(queued->launch->collective);
    pending.push(queued->launch);
  }
  const auto states = [&] {
    std::vector<std::string_view> names;
    for (const auto& c : recorder->snapshot().collectives) {
      names.push_back(comm::flight_state_name(c.state));
    }
    return names;
  };
  using Names = std::vector<std::string_view>;
  CHECK(states() == Names{"queued", "queued", "queued"});
  *first.done = true;  // between two polls: its start was not observed
  *second.start = true;
  CHECK(pending.advance(NcclLaunch::Time()) == nullptr);
  CHECK(states() == Names{"done", "running", "queued"});
  CHECK(recorder->snapshot().newest_started()->signature.sequence == 1);
  *second.done = true;
  CHECK(pending.advance(NcclLaunch::Time()) == nullptr);
  CHECK(recorder->snapshot().newest_started()->signature.sequence == 1);
  pending.record_failure();
  CHECK(states() == Names{"done", "done", "failed"});
}

TEST_CASE("a failing device does not count as a finished collective") {
  comm::PendingCollectives pending;
  const Queued item(0);
  item.launch->done = std::make_shared<FailedEvent>();
  pending.push(item.launch);
  CHECK_THROWS_AS(pending.advance(NcclLaunch::Time()), CudaError);
  CHECK(pending.oldest() == item.launch);
}

TEST_CASE("a position survives its encoding, and malformed texts are refused") {
  const NcclPosition position = at(all_gather(7), false);
  const auto back = NcclPosition::decode(position.encode());
  REQUIRE(back.has_value());
  CHECK(back->called == 8);
  CHECK(back->has_started == 0);
  CHECK(back->oldest == position.oldest);
  CHECK_FALSE(NcclPosition::decode("").has_value());
  CHECK_FALSE(NcclPosition::decode(position.encode() + "x").has_value());
}

TEST_CASE("blame for a late collective") {
  const Collective mine = all_gather(7);
  const comm::NcclSuspicion late{.collective = mine, .late = true};
  struct Case {
    std::vector<std::optional<NcclPosition>> positions;
    CommFailure failure;
    std::vector<int> culprits;
    const char* text;
  };
  const std::vector<Case> cases = {
      {{at(mine), std::nullopt, at(mine)},
       CommFailure::Timeout,
       {1},
       "all_gather#7 (h.1): not done within 30 s, and rank 1 (b, pid 2) did not answer within 2 s"},
      {{at(mine), idle(7), idle(7)},
       CommFailure::Timeout,
       {1, 2},
       "all_gather#7 (h.1): 1 of 3 ranks arrived within 30 s, missing: rank 1 (b, pid 2), rank 2"},
      {{at(mine), at(all_gather(7, "h.2")), at(mine)},
       CommFailure::Mismatch,
       {1},
       "ranks disagree on collective #7: rank 1 called all_gather#7 (h.2) f32[64], where 2 of 3"},
      {{at(mine), at(mine), at(mine, false)},
       CommFailure::Timeout,
       {2},
       "rank 2 (c, pid 3) called it, but the work before it on the device was not done within"},
      {{at(mine), at(mine), at(mine)},
       CommFailure::Timeout,
       {},
       "all ranks arrived, but the data to or from a rank did not get through within 30 s"},
  };
  for (const Case& test : cases) {
    CAPTURE(test.text);
    const CommError error = judged(late, test.positions);
    const std::string text = error.what();
    CAPTURE(text);
    CHECK(text.find(test.text) != std::string::npos);
    CHECK(error.failure() == test.failure);
    CHECK(error.culprits() == test.culprits);
  }
  // A rank that hangs in an earlier collective delays the others.
  auto earlier = at(all_gather(5));
  earlier.called = 9;
  CHECK(judged(late, {at(mine), at(mine), earlier}).culprits() == std::vector<int>{2});
  // A rank that has finished this collective, e.g. a broadcast's root, does not.
  CHECK(judged(late, {at(mine), idle(8), at(mine)}).culprits().empty());
}

TEST_CASE("blame for an NCCL error") {
  const Collective mine = all_gather(7);
  const comm::NcclSuspicion peer{.collective = mine, .remote = true, .text = "NCCL: peer gone"};
  const CommError lost = judged(peer, {at(mine), std::nullopt, at(mine)});
  CHECK(lost.failure() == CommFailure::PeerLost);
  CHECK(lost.culprits() == std::vector<int>{1});
  CHECK(std::string(lost.what()).find("lost rank 1 (b, pid 2)") != std::string::npos);
  const CommError unknown = judged(peer, {at(mine), at(mine), at(mine)});
  CHECK(unknown.failure() == CommFailure::PeerLost);
  CHECK(unknown.culprits().empty());
  CHECK(std::string(unknown.what()) == "all_gather#7 (h.1): rank 0: NCCL: peer gone");
  const comm::NcclSuspicion own{.collective = mine, .text = "the device is lost"};
  const CommError device = judged(own, {at(mine), at(mine), at(mine)});
  CHECK(device.failure() == CommFailure::Aborted);
  CHECK(device.culprits() == std::vector<int>{0});
}
