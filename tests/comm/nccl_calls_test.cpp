// Ranks that do not call the same over NCCL: found before data moves, by what each expects the
// others to call, at the cost of few messages.
#include <algorithm>

#include "comm/nccl/call_comparison.h"
#include "comm/nccl/call_history.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/fake_nccl_ranks.h"

using namespace tessera;
using namespace tessera::test;
using comm::CallHistory;
using comm::ReduceOp;

namespace {

// Counts what is asked of a store.
class CountingStore final : public comm::Store {
 public:
  void set(const std::string& key, std::string_view value) override {
    ++requests;
    store_.set(key, value);
  }
  std::string get(const std::string& key, std::chrono::milliseconds deadline) override {
    ++requests;
    return store_.get(key, deadline);
  }
  bool has(const std::string& key) override { return store_.has(key); }
  void leave(const std::string& name, int readers) override {
    ++requests;
    store_.leave(name, readers);
  }
  std::size_t size() const { return store_.size(); }

  std::atomic<int> requests = 0;

 private:
  comm::MemoryStore store_;
};

// Calls of a training step of four blocks over two micro-batches, and of an evaluation.
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
    for (int h = 0; h < 4; ++h) calls.push_back(fmt::format("gather {}", h));
  }
  calls.emplace_back("val_loss");
  return calls;
}

// @return how many were not expected
int surprises(CallHistory& history, const std::vector<std::string>& calls) {
  int count = 0;
  for (const std::string& call : calls) {
    count += history.expected() == nullptr || *history.expected() != call;
    history.add(call);
  }
  return count;
}

TensorView view_at(std::vector<std::int64_t>& values, std::int64_t n) {
  return dense_view(values.data(), DType::I64, {n});
}

// What a rank calls in every step, and what the odd one does instead.
struct Mismatch {
  const char* name;
  void (*call)(comm::Communicator&, std::vector<std::int64_t>&, bool odd);
  const char* text;  // with # for the number of the first call, MOST for all but one of the ranks
};

const std::vector<Mismatch>& mismatches() {
  static const std::vector<Mismatch> all = {
      {"operation",
       [](auto& c, auto& x, bool odd) {
         if (odd) {
           c.start_barrier({.label = "x"});
         } else {
           c.start_all_reduce(view_at(x, 12), ReduceOp::Sum, {.label = "x"});
         }
       },
       "rank 1 called barrier#0 (x), where MOST ranks called all_reduce#0 (x) i64[12] sum"},
      {"count",
       [](auto& c, auto& x, bool odd) {
         c.start_all_gather(view_at(x, odd ? 24 : 12), {.label = "h.1"});
       },
       "rank 1 called all_gather#0 (h.1) i64[24], where MOST ranks called all_gather#0 (h.1) "
       "i64[12]"},
      {"dtype",
       [](auto& c, auto& x, bool odd) {
         TensorView view = view_at(x, 12);
         if (odd) view.dtype = DType::I32;
         c.start_all_gather(view, {});
       },
       "i32[12]"},
      {"reduction",
       [](auto& c, auto& x, bool odd) {
         c.start_all_reduce(view_at(x, 12), odd ? ReduceOp::Max : ReduceOp::Sum, {});
       },
       "rank 1 called all_reduce#0 i64[12] max"},
      {"root",
       [](auto& c, auto& x, bool odd) { c.start_broadcast(view_at(x, 12), odd ? 1 : 0, {}); },
       "i64[12] from rank 1, where"},
      {"label",
       [](auto& c, auto& x, bool odd) {
         c.start_all_gather(view_at(x, 12), {.label = odd ? "h.2" : "h.1"});
       },
       "rank 1 called all_gather#0 (h.2)"},
      {"order",
       [](auto& c, auto& x, bool odd) {
         c.start_all_gather(view_at(x, 12), {.label = "h.0"});
         c.start_all_reduce(view_at(x, 12), ReduceOp::Sum, {.label = odd ? "norm" : "loss"});
         c.start_all_reduce(view_at(x, 12), ReduceOp::Sum, {.label = odd ? "loss" : "norm"});
       },
       "rank 1 called all_reduce#1 (norm) i64[12] sum, where MOST ranks called all_reduce#1 "
       "(loss)"},
      {"a call left out",
       [](auto& c, auto& x, bool odd) {
         if (!odd) c.start_all_gather(view_at(x, 12), {.label = "h.0"});
         c.start_all_gather(view_at(x, 12), {.label = "h.1"});
       },
       "rank 1 called all_gather#0 (h.1) i64[12], where MOST ranks called all_gather#0 (h.0)"},
      {"a group",
       [](auto& c, auto& x, bool odd) {
         comm::CollectiveGroup group(c);
         c.start_all_reduce(view_at(x, 12), ReduceOp::Sum, {.label = "h.0"});
         c.start_all_reduce(view_at(x, 12), odd ? ReduceOp::Max : ReduceOp::Sum, {.label = "h.1"});
         group.end();
       },
       "rank 1 called all_reduce#0 (h.1) i64[12] max, where MOST ranks called all_reduce#0 "
       "(h.1) i64[12] sum"},
  };
  return all;
}

// "...#1..." with the numbers of calls that come after `first` others.
std::string numbered(std::string text, int first) {
  for (std::size_t at = 0; (at = text.find('#', at)) != std::string::npos; ++at) {
    text.replace(at + 1, 1, std::to_string(text[at + 1] - '0' + first));
  }
  return text;
}

}  // namespace

TEST_CASE("steps are expected from the third on, and evaluations from their second time on") {
  const auto step = step_calls(), evaluation = evaluation_calls();
  CallHistory history;
  CHECK(history.expected() == nullptr);
  const int first = surprises(history, step);
  CHECK(first > 8);  // each kind at least once
  CHECK(surprises(history, step) <= 3);
  for (int i = 0; i < 10; ++i) CHECK(surprises(history, step) == 0);
  CHECK(surprises(history, evaluation) <= 5);
  CHECK(surprises(history, step) <= 3);
  for (int i = 0; i < 11; ++i) CHECK(surprises(history, step) == 0);
  CHECK(surprises(history, evaluation) <= 3);
  // From now on they come at their time.
  for (int round = 0; round < 3; ++round) {
    int count = 0;
    for (int i = 0; i < 12; ++i) count += surprises(history, step);
    count += surprises(history, evaluation);
    CHECK(count <= (round == 0 ? 3 : 0));
  }
}

TEST_CASE("a history forgets what is old, and still expects what it has") {
  CallHistory history;
  const auto step = step_calls();
  std::uint64_t count = 0;
  while (count < CallHistory::kKept + 2 * step.size()) {
    const int found = surprises(history, step);
    if (count > 3 * step.size()) CHECK(found == 0);
    count += step.size();
  }
  CHECK(history.size() == count);
  CHECK(history.find(0) == nullptr);
  CHECK(history.find(count) == nullptr);
  REQUIRE(history.find(count - 1) != nullptr);
  CHECK(*history.find(count - 1) == "norm");
  // What was never seen before pushes it out, and is expected when it comes again.
  std::vector<std::string> others;
  for (int i = 0; i < 300; ++i) others.push_back(fmt::format("other {}", i));
  CHECK(surprises(history, others) >= 299);
  CHECK(surprises(history, others) == 1);
  CHECK(history.size() == count + 600);
}

TEST_CASE("ranks that disagree all throw the same error, before the odd one's data moves") {
  struct Start {
    int world, steps;  // that are alike before
  };
  for (const Start& start :
       {Start{2, 0}, Start{2, 3}, Start{3, 0}, Start{3, 3}, Start{4, 0}, Start{4, 3}}) {
    const int world = start.world, steps = start.steps;
    for (const Mismatch& test : mismatches()) {
      const auto n = static_cast<std::size_t>(world);
      INFO(world, " ranks after ", steps, " steps: ", test.name);
      FakeRanks ranks(world);
      ranks.timeout = 60s;
      std::vector<int> before(n);
      std::vector<std::vector<std::int64_t>> buffers(n, std::vector<std::int64_t>(32));
      std::atomic<int> ready = 0;
      const Stopwatch watch;
      const auto results = run_ranks(world, [&, all = world, alike = steps](int rank) {
        const auto c = ranks.join(rank);
        auto& buffer = buffers[static_cast<std::size_t>(rank)];
        for (int i = 0; i < alike; ++i) test.call(*c, buffer, false);
        before[static_cast<std::size_t>(rank)] = ranks.state(rank)->launches;
        // Launches that the device is never done with, since not all ranks make them.
        for (++ready; ready < all;) std::this_thread::sleep_for(1ms);
        ranks.state(rank)->collectives_end = false;
        test.call(*c, buffer, rank == 1);
        stay_until_failure(*c);
      });
      CHECK(watch.elapsed() < 5s);
      const std::string text = all_but_one(numbered(test.text, before[1]), world);
      const int agreed = std::string_view(test.name) == "order" ? 1 : 0;
      for (int r = 0; r < world; ++r) {
        CAPTURE(r);
        const RankResult& result = results[static_cast<std::size_t>(r)];
        CAPTURE(result.error);
        CHECK(result.failure == CommFailure::Mismatch);
        CHECK(result.culprits == std::vector<int>{1});
        CHECK(result.error.find(text) != std::string::npos);
        CHECK(result.error == results[0].error);
        const int launched = ranks.state(r)->launches - before[static_cast<std::size_t>(r)];
        if (r == 1 || steps == 0)
          CHECK(launched == agreed);
        else
          CHECK(launched >= agreed);
      }
      CHECK(ranks.stuck.empty());
    }
  }
}

TEST_CASE("of ranks of which most turn to something new, the one that does not is named") {
  FakeRanks ranks(3);
  ranks.timeout = 60s;
  const Stopwatch watch;
  const auto results = run_ranks(3, [&](int rank) {
    const auto c = ranks.join(rank);
    for (int i = 0; i < 3; ++i) c->barrier({.label = "step"});
    ranks.state(rank)->collectives_end = false;
    c->start_barrier({.label = rank == 1 ? "step" : "evaluation"});
    stay_until_failure(*c);
  });
  CHECK(watch.elapsed() < 5s);
  for (const RankResult& result : results) {
    CHECK(result.failure == CommFailure::Mismatch);
    CHECK(result.culprits == std::vector<int>{1});
    CHECK(result.error.find("rank 1 called barrier#3 (step), where 2 of 3 ranks called barrier#3 "
                            "(evaluation)") != std::string::npos);
  }
  for (const int r : {0, 2}) CHECK(ranks.state(r)->launches == 3);
}

TEST_CASE("of two ranks that turn away at different calls, the first is compared") {
  FakeRanks ranks(4);
  ranks.timeout = 60s;
  const auto results = run_ranks(4, [&](int rank) {
    const auto c = ranks.join(rank);
    const auto step = [&](bool first_odd, bool second_odd) {
      c->start_barrier({.label = first_odd ? "odd" : "a"});
      c->start_barrier({.label = second_odd ? "odder" : "b"});
    };
    for (int i = 0; i < 3; ++i) step(false, false);
    ranks.state(rank)->collectives_end = false;
    if (rank == 2) std::this_thread::sleep_for(100ms);  // rank 3 has asked by then
    step(rank == 2, rank == 3);
    stay_until_failure(*c);
  });
  for (const RankResult& result : results) {
    CHECK(result.failure == CommFailure::Mismatch);
    CHECK(result.culprits == std::vector<int>{2});
    CHECK(result.error.find("rank 2 called barrier#6 (odd), where") != std::string::npos);
  }
}

TEST_CASE("a rank that has ended does not hide who disagrees") {
  FakeRanks ranks(4);
  ranks.timeout = 60s;
  const Stopwatch watch;
  const auto results = run_ranks(4, [&](int rank) {
    const auto c = ranks.join(rank);
    for (int i = 0; i < 3; ++i) c->barrier({.label = "step"});
    if (rank == 3) return;
    ranks.state(rank)->collectives_end = false;
    c->start_barrier({.label = rank == 1 ? "other" : "step"});
    stay_until_failure(*c);
  });
  CHECK(watch.elapsed() < 5s);
  for (const int r : {0, 1, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(r)];
    CHECK(result.failure == CommFailure::Mismatch);
    CHECK(result.culprits == std::vector<int>{1});
    CHECK(result.error.find("where 2 of 3 ranks called barrier#3 (step)") != std::string::npos);
  }
}

TEST_CASE("what is expected sends no message, and what was compared leaves nothing behind") {
  FakeRanks ranks(3);
  ranks.timeout = 60s;
  const auto store = std::make_shared<CountingStore>();
  ranks.store = store;
  std::atomic<int> ready = 0, first = 0, after_two = 0;
  std::atomic<std::size_t> size_before = 0;
  const auto results = run_ranks(3, [&](int rank) {
    const auto c = ranks.join(rank);
    std::vector<std::int64_t> x(6);
    const auto meet = [&](int round) {
      for (++ready; ready < 3 * round;) std::this_thread::sleep_for(1ms);
    };
    const auto step = [&] {
      for (int h = 0; h < 5; ++h) c->all_gather(view_at(x, 6), {.label = fmt::format("h.{}", h)});
      for (int h = 4; h >= 0; --h) c->all_reduce(view_at(x, 6), ReduceOp::Sum, {});
    };
    meet(1);
    if (rank == 0) size_before = store->size();
    if (rank == 0) first = store->requests.load();
    meet(2);
    step();
    step();
    meet(3);
    if (rank == 0) first = store->requests - first;
    if (rank == 0) after_two = store->requests.load();
    meet(4);
    for (int i = 0; i < 50; ++i) step();
    meet(5);
    if (rank == 0) {
      expect(store->requests == after_two, "messages", store->requests, after_two);
      expect(store->size() == size_before, "left behind", static_cast<int>(store->size()),
             static_cast<int>(size_before));
    }
    meet(6);
  });
  for (const RankResult& result : results) CHECK(result.error == "");
  CHECK(first >= 6 * 3 * 3);
}

TEST_CASE("ranks that come late to something new are waited for, to the deadline") {
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
