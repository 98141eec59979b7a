#include "comm/communicator.h"

#include <atomic>
#include <cmath>
#include <limits>

#include "tests/comm/collective_checks.h"
#include "tests/comm/ranks.h"

using namespace tessera;
using namespace tessera::test;
using comm::ReduceOp;

namespace {

constexpr const char* kBackends[] = {
    "threads", "tcp", "shm", "shm, one mapping", "threads, staged", "tcp, staged", "shm, staged"};

void for_each_backend(const std::function<void(const std::string&, int)>& body) {
  for (const std::string backend : kBackends) {
    for (int world = 1; world <= 5; ++world) {
      CAPTURE(backend);
      CAPTURE(world);
      body(backend, world);
    }
  }
}

}  // namespace

TEST_CASE("collectives give the expected values bit for bit, on every backend and world size") {
  for_each_backend([](const std::string& backend, int world) {
    const Group group(backend, world);
    const auto results = run_ranks(world, [&](int rank) {
      const auto c = group.join(rank);
      if (c->rank() != rank || c->world_size() != world) throw std::runtime_error("identity");
      check_everything(*c);
    });
    for (const RankResult& result : results) CHECK(result.error == "");
  });
}

TEST_CASE("max propagates a NaN of any rank to all") {
  for (const std::string backend : kBackends) {
    const Group group(backend, 3);
    const auto results = run_ranks(3, [&](int rank) {
      const auto c = group.join(rank);
      std::vector<float> x(3, static_cast<float>(rank));
      x[static_cast<std::size_t>(rank)] = std::numeric_limits<float>::quiet_NaN();
      Mirror<float> mirror(x);
      c->all_reduce(mirror.view(), ReduceOp::Max, {});
      mirror.fetch();
      for (const float v : x) expect(std::isnan(v), "NaN", rank, 3);
    });
    for (const RankResult& result : results) CHECK(result.error == "");
  }
}

TEST_CASE("queued collectives run in order and overlap with the caller") {
  for (const std::string backend : kBackends) {
    CAPTURE(backend);
    const Group group(backend, 2);
    const auto results = run_ranks(2, [&](int rank) {
      const auto c = group.join(rank);
      // Each step depends on the previous one: another order gives other values.
      std::vector<double> x(5000, rank == 0 ? 1.0 : 2.0), y(1, 0.0);
      std::vector<comm::WorkPtr> works;
      for (int i = 0; i < 6; ++i) {
        works.push_back(c->start_all_reduce(view_of(x), ReduceOp::Sum, {.label = "sum"}));
        works.push_back(c->start_broadcast(view_of(x), 1, {.label = "cast"}));
      }
      works.push_back(c->start_barrier({}));
      works.back()->wait();
      for (const auto& work : works) expect(work->is_done(), "order", rank, 0);
      for (const auto& work : works) work->wait();
      expect(x[0] == 3.0 * 32 && x[4999] == 3.0 * 32, "chain", rank, 6);
    });
    for (const RankResult& result : results) CHECK(result.error == "");
  }
}

TEST_CASE("invalid arguments are refused before data are sent") {
  for (const char* backend : {"single", "threads", "tcp", "shm"}) {
    CAPTURE(backend);
    const int world = std::string_view(backend) == "single" ? 1 : 2;
    const Group group(backend, world);
    const auto results = run_ranks(world, [&](int rank) {
      const auto c = group.join(rank);
      const auto refused = [&](const char* text, const std::function<void()>& call) {
        try {
          call();
        } catch (const InvalidArgument& error) {
          expect(std::string(error.what()).find(text) != std::string::npos, error.what(), rank, 0);
          return;
        }
        throw std::runtime_error(std::string("accepted: ") + text);
      };
      std::vector<float> odd(5), even(4), small(1);
      std::vector<double> doubles(4);
      if (world == 2) {
        refused("do not split into 2", [&] { c->all_gather(view_of(odd), {}); });
        refused("needs 2, got 1", [&] { c->reduce_scatter(view_of(even), view_of(small), {}); });
      }
      refused("f32 or bf16", [&] { c->reduce_scatter(view_of(doubles), view_of(even), {}); });
      refused("of dtype f32, got f64",
              [&] { c->reduce_scatter(view_of(even), view_of(doubles), {}); });
      TensorView part = view_of(even);
      part.shape = part.strides = {4 / world};
      part.strides = {1};
      refused("overlap", [&] { c->reduce_scatter(view_of(even), part, {}); });
      refused("is not a rank", [&] { c->broadcast(view_of(even), world, {}); });
      TensorView strided = view_of(even);
      strided.shape = {2};
      strided.strides = {2};
      refused("contiguous", [&] { c->all_gather(strided, {}); });
      std::vector<BFloat16> bf16(4);
      refused("f64, f32 or i64", [&] { c->all_reduce(view_of(bf16), ReduceOp::Sum, {}); });
      c->barrier({});  // the communicator stays usable
    });
    for (const RankResult& result : results) CHECK(result.error == "");
  }
}

TEST_CASE("abort ends pending waits on all ranks, and makes later calls fail") {
  for (const std::string backend : kBackends) {
    CAPTURE(backend);
    const Group group(backend, 3);
    const Stopwatch watch;
    const auto results = run_ranks(3, [&](int rank) {
      const auto c = group.join(rank);
      c->barrier({});
      if (rank == 1) {
        std::this_thread::sleep_for(50ms);
        c->abort("the disk is full");
        c->abort("again");
        try {
          c->barrier({});
        } catch (const CommError& error) {
          expect(error.failure() == CommFailure::Aborted, "kind", rank, 0);
        }
      }
      std::vector<float> x(3);
      const Mirror<float> mirror(x);
      const auto first = c->start_all_gather(mirror.view(), {.label = "h.1"});
      const auto queued = c->start_barrier({});
      std::string text;
      try {
        queued->wait();
      } catch (const CommError& error) {
        expect(error.failure() == CommFailure::Aborted, "kind of a queued one", rank, 0);
      }
      first->wait();
    });
    CHECK(watch.elapsed() < 5s);
    for (const RankResult& result : results) {
      CHECK(result.failure == CommFailure::Aborted);
      CHECK(result.error.find("the disk is full") != std::string::npos);
      CHECK(result.error.find("rank 1") != std::string::npos);
    }
  }
}

TEST_CASE("the first wait throws the error itself, whichever collective it waits for") {
  for (const std::string backend : kBackends) {
    CAPTURE(backend);
    const Group group(backend, 2);
    std::atomic<bool> told = false;
    std::vector<std::string> texts;
    std::vector<CommFailure> kinds;
    const auto results = run_ranks(2, [&](int rank) {
      const auto c = group.join(rank);
      const std::shared_ptr<void> tell(nullptr, [&](void*) {
        told = true;
        told.notify_all();
      });
      c->barrier({});
      if (rank == 1) return told.wait(false);  // misses the barriers
      std::vector<comm::WorkPtr> works;
      for (const char* label : {"a", "b", "c"})
        works.push_back(c->start_barrier({.label = label, .deadline = 1500ms}));
      for (const std::size_t i : {1U, 2U, 0U}) {
        try {
          works[i]->wait();
        } catch (const CommError& error) {
          kinds.push_back(error.failure());
          texts.emplace_back(error.what());
        }
      }
    });
    using enum CommFailure;
    CHECK(kinds == std::vector{Timeout, Aborted, Timeout});
    REQUIRE(texts.size() == 3);
    CHECK(texts[0] == texts[2]);
    CHECK(texts[1].find("barrier#3 (c) did not run: " + texts[0]) == 0);
    CHECK(results[0].error == "");
  }
}

TEST_CASE("other ranks see an abort at once, while the aborted communicator still exists") {
  for (const std::string backend : kBackends) {
    CAPTURE(backend);
    const Group group(backend, 2);
    std::atomic<bool> told = false;
    const auto results = run_ranks(2, [&](int rank) {
      const auto c = group.join(rank);
      c->barrier({});
      if (rank == 1) {
        c->abort("the disk is full");
        return told.wait(false);
      }
      const Stopwatch watch;
      try {
        c->barrier({.label = "step", .deadline = 4s});
      } catch (const CommError&) {
        told = true;
        told.notify_all();
        if (watch.elapsed() > 1s) throw std::runtime_error("late");
        throw;
      }
    });
    CHECK(results[0].failure == CommFailure::Aborted);
    CHECK(results[0].error.find("the disk is full") != std::string::npos);
    CHECK(results[1].error == "");
  }
}

TEST_CASE(
    "single: the first call after a failure throws it, later ones and those after abort fail") {
  const auto failure_of = [](comm::Communicator& c) {
    try {
      c.barrier({});
    } catch (const CommError& error) {
      return std::optional(error.failure());
    }
    return std::optional<CommFailure>();
  };
  const auto c = comm::make_single_communicator();
  c->fail(CommError(CommFailure::Timeout, {0}, "too late"));
  CHECK(failure_of(*c) == CommFailure::Timeout);
  CHECK(failure_of(*c) == CommFailure::Aborted);
  const auto aborted = comm::make_single_communicator();
  aborted->abort("enough");
  CHECK(failure_of(*aborted) == CommFailure::Aborted);
}

TEST_CASE("destroying a communicator ends pending collectives in bounded time") {
  for (const std::string backend : kBackends) {
    CAPTURE(backend);
    const Group group(backend, 2);
    const Stopwatch watch;
    const auto results = run_ranks(2, [&](int rank) {
      auto c = group.join(rank);
      c->barrier({});
      std::vector<float> x(2);
      const Mirror<float> mirror(x);
      if (rank == 0) {
        const auto work = c->start_all_gather(mirror.view(), {.label = "late", .deadline = 60s});
        c.reset();
        work->wait();
      } else {
        std::this_thread::sleep_for(30ms);
      }
    });
    CHECK(watch.elapsed() < 5s);
    CHECK(results[0].failure == CommFailure::Aborted);
    CHECK(results[0].error.find("destroyed") != std::string::npos);
    CHECK(results[1].error == "");
  }
}
