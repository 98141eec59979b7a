#include <algorithm>

#include "comm/nccl/call_history.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/fake_nccl_ranks.h"
#include "tests/comm/mismatches.h"

using namespace tessera;
using namespace tessera::test;
using comm::CallHistory;
using comm::ReduceOp;

namespace {

// Collective calls of a training step with four blocks and two micro-batches, and of an evaluation.
std::vector<std::string> step_calls() {
  std::vector<std::string> calls;
  for (int micro = 0; micro < 2; ++micro) {
    for (int h = 0; h < 4; ++h) calls.push_back(fmt::format("gather {}", h));
    for (int h = 3; h >= 0; --h) {
      calls.push_back(fmt::format("gather {}", h));
      calls.push_back(fmt::format("reduce {}", h));
    }
  }
  calls.emplace_back("norm");
  return calls;
}
std::vector<std::string> evaluation_calls() {
  std::vector<std::string> calls;
  for (int batch = 0; batch < 3; ++batch) {
    calls.emplace_back("stop");
    for (int h = 0; h < 4; ++h) calls.push_back(fmt::format("gather {}", h));
  }
  calls.emplace_back("val_loss");
  return calls;
}

int mispredictions(CallHistory& history, const std::vector<std::string>& calls) {
  int count = 0;
  for (const std::string& call : calls) {
    count += history.expected() == nullptr || *history.expected() != call;
    history.add(call);
  }
  return count;
}

// Replaces "#1" by the call number after `first` other calls, and so on.
std::string numbered(std::string text, int first) {
  for (std::size_t at = 0; (at = text.find('#', at)) != std::string::npos; ++at) {
    text.replace(at + 1, 1, std::to_string(text[at + 1] - '0' + first));
  }
  return text;
}

// Runs three equal steps on each rank, then `call`, whose collectives no device finishes.
std::vector<RankResult> after_steps(FakeRanks& ranks,
                                    const std::function<void(comm::Communicator&, int)>& step,
                                    const std::function<void(comm::Communicator&, int)>& call) {
  ranks.timeout = 60s;
  std::atomic<int> ready = 0;
  const Stopwatch watch;
  auto results = run_ranks(ranks.group->world_size(), [&](int rank) {
    const auto c = ranks.join(rank);
    for (int i = 0; i < 3; ++i) step(*c, rank);
    for (++ready; ready < ranks.group->world_size();) std::this_thread::sleep_for(1ms);
    ranks.state(rank)->collectives_end = false;
    call(*c, rank);
    stay_until_failure(*c);
  });
  CHECK(watch.elapsed() < 5s);
  return results;
}

void check_odd(const std::vector<RankResult>& results, int odd, const std::string& text) {
  for (const RankResult& result : results) {
    CAPTURE(result.error);
    CHECK(result.failure == CommFailure::Mismatch);
    CHECK(result.culprits == std::vector<int>{odd});
    CHECK(result.error.find(text) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("steps are predicted from the third on, and evaluations cost a few mispredictions") {
  const auto step = step_calls(), evaluation = evaluation_calls();
  CallHistory history;
  CHECK(history.expected() == nullptr);
  CHECK(mispredictions(history, step) > 8);  // each kind of call at least once
  CHECK(mispredictions(history, step) <= 3);
  for (int i = 0; i < 10; ++i) CHECK(mispredictions(history, step) == 0);
  for (int round = 0; round < 3; ++round) {
    int count = mispredictions(history, evaluation);
    for (int i = 0; i < 4; ++i) count += mispredictions(history, step);
    CHECK(count <= 10);
    for (int i = 0; i < 8; ++i) CHECK(mispredictions(history, step) == 0);
  }
}

TEST_CASE("a history forgets old calls and still predicts") {
  CallHistory history;
  const auto step = step_calls();
  std::uint64_t count = 0;
  while (count < CallHistory::kKept + 2 * step.size()) {
    const int found = mispredictions(history, step);
    if (count > 3 * step.size()) CHECK(found == 0);
    count += step.size();
  }
  CHECK(history.size() == count);
  CHECK(history.find(0) == nullptr);
  CHECK(history.find(count) == nullptr);
  REQUIRE(history.find(count - 1) != nullptr);
  CHECK(*history.find(count - 1) == "norm");
}

TEST_CASE("ranks that disagree all throw the same error, before the odd one's data moves") {
  for (const bool at_once : {true, false}) {
    for (const int world : {2, 3, 4}) {
      for (const Mismatch& mismatch : mismatches()) {
        // Impossible after equal steps: an unmatched launch of the fake never ends, and blocks the
        // next one.
        if (mismatch.is_later && !at_once) continue;
        INFO(world, " ranks, ", mismatch.name, at_once ? "" : " after equal steps");
        FakeRanks ranks(world);
        ranks.timeout = 60s;
        std::vector<int> before(static_cast<std::size_t>(world));
        const auto call = [&](comm::Communicator& c, bool odd) {
          std::vector<float> buffer(32);
          mismatch.call(c, view_of(buffer), odd);
        };
        std::vector<RankResult> results;
        if (at_once) {
          results = run_ranks(world, [&](int rank) { call(*ranks.join(rank), rank == 1); });
        } else {
          results = after_steps(
              ranks, [&](auto& c, int) { call(c, false); },
              [&](auto& c, int rank) {
                before[static_cast<std::size_t>(rank)] = ranks.state(rank)->launches;
                call(c, rank == 1);
              });
        }
        check_odd(results, 1, numbered(text_of(mismatch, world, 1), before[1]));
        for (const RankResult& result : results) CHECK(result.error == results[0].error);
        CHECK(ranks.state(1)->launches == before[1] + (mismatch.is_later ? 1 : 0));
        CHECK(ranks.stuck.empty());
      }
    }
  }
}

TEST_CASE("a group with one different collective is a mismatch") {
  FakeRanks ranks(3);
  const auto group = [&](comm::Communicator& c, bool odd) {
    std::vector<std::int64_t> own(12);
    comm::CollectiveGroup both(c);
    c.start_all_reduce(view_of(own), ReduceOp::Sum, {.label = "h.0"});
    const auto last =
        c.start_all_reduce(view_of(own), odd ? ReduceOp::Max : ReduceOp::Sum, {.label = "h.1"});
    both.end();
    last->wait();
  };
  check_odd(after_steps(
                ranks, [&](auto& c, int) { group(c, false); },
                [&](auto& c, int rank) { group(c, rank == 1); }),
            1,
            "rank 1 called all_reduce#3 (h.1) i64[12] max, where 2 of 3 ranks called all_reduce#3 "
            "(h.1) i64[12] sum");
}

TEST_CASE("if most ranks leave the predicted sequence, the one that follows it is named") {
  FakeRanks ranks(3);
  check_odd(
      after_steps(
          ranks, [](auto& c, int) { c.barrier({.label = "step"}); },
          [](auto& c, int rank) { c.start_barrier({.label = rank == 1 ? "step" : "evaluation"}); }),
      1, "rank 1 called barrier#3 (step), where 2 of 3 ranks called barrier#3 (evaluation)");
  for (const int r : {0, 2}) CHECK(ranks.state(r)->launches == 3);
}

TEST_CASE("if two ranks leave the sequence at different calls, the first call is compared") {
  FakeRanks ranks(4);
  const auto step = [](comm::Communicator& c, bool first_odd, bool second_odd) {
    c.start_barrier({.label = first_odd ? "odd" : "a"});
    c.start_barrier({.label = second_odd ? "odder" : "b"});
  };
  check_odd(after_steps(
                ranks, [&](auto& c, int) { step(c, false, false); },
                [&](auto& c, int rank) {
                  // Rank 2 diverges only after rank 3 has asked.
                  while (rank == 2 && !ranks.store->has("nccl/calls/3/asked"))
                    std::this_thread::sleep_for(1ms);
                  step(c, rank == 2, rank == 3);
                }),
            2, "rank 2 called barrier#6 (odd), where");
}

TEST_CASE("a predicted launch sends no message, and a comparison leaves no keys") {
  FakeRanks ranks(3);
  ranks.timeout = 60s;
  std::atomic<int> requests = 0;
  // Excludes the watchdog's polling of the store.
  const auto store = std::make_shared<HookedStore>([&] { ++requests; });
  ranks.store = store;
  ranks.store_poll = 1h;
  std::atomic<int> ready = 0, first = 0;
  const auto results = run_ranks(3, [&](int rank) {
    const auto c = ranks.join(rank);
    std::vector<std::int64_t> x(6);
    const auto meet = [&](int round) {
      for (++ready; ready < 3 * round;) std::this_thread::sleep_for(1ms);
    };
    const auto step = [&] {
      for (int h = 0; h < 5; ++h) c->all_gather(view_of(x), {.label = fmt::format("h.{}", h)});
      for (int h = 4; h >= 0; --h) c->all_reduce(view_of(x), ReduceOp::Sum, {});
    };
    meet(1);
    const std::size_t size_before = store->size();
    meet(2);
    step();
    step();
    std::this_thread::sleep_for(100ms);  // the watchdogs have asked the store for the first time
    meet(3);
    if (rank == 0) first = requests.exchange(0);
    meet(4);
    for (int i = 0; i < 50; ++i) step();
    meet(5);
    expect(requests == 0, "messages", requests, 0);
    expect(store->size() == size_before, "left behind", rank, 0);
    meet(6);
  });
  for (const RankResult& result : results) CHECK(result.error == "");
  CHECK(first >= 6 * 3 * 3);
}

TEST_CASE("late ranks are waited for at an unpredicted call, until the deadline") {
  for (const bool too_late : {false, true}) {
    CAPTURE(too_late);
    FakeRanks ranks(3);
    ranks.timeout = 500ms;
    const auto results = run_ranks(3, [&](int rank) {
      const auto c = ranks.join(rank);
      c->barrier({.label = "start", .deadline = 20s});
      if (rank == 1) std::this_thread::sleep_for(too_late ? 1500ms : 300ms);
      if (!too_late) return c->barrier({.label = "new", .deadline = 20s});
      if (rank == 1) return stay_until_failure(*c);
      c->barrier({.label = "new"});
    });
    for (const RankResult& result : results) {
      CHECK(
          result.error ==
          (too_late ? "barrier#1 (new): 2 of 3 ranks arrived within 0.5 s, missing: rank 1" : ""));
    }
  }
}
