// The communicator over NCCL, with NCCL simulated on host threads: values, groups and refused
// calls. nccl_gpu_test covers real NCCL.
#include "comm/nccl.h"

#include <limits>

#include "comm/nccl/position.h"
#include "core/base/memory.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/fake_nccl_ranks.h"
#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"
#include "tests/support/multiprocess.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::test;
using comm::ReduceOp;

namespace {

constexpr CollectiveLimits kLimits{.sums_in_rank_order = true, .floating_max = false};

}  // namespace

TEST_CASE("collectives give the expected values, from device and host memory") {
  for (const bool on_device : {true, false}) {
    for (int world = 1; world <= 4; ++world) {
      CAPTURE(on_device);
      CAPTURE(world);
      FakeRanks ranks(world);
      ranks.timeout = 20s;
      for (const auto& state : ranks.states) state->polls_in_progress = world;
      const auto results = run_ranks(world, [&](int rank) {
        auto c = ranks.join(rank);
        const auto context = device_context();
        if (!on_device) device_context().reset();
        expect(c->backend() == "nccl" && c->rank() == rank, "identity", rank, world);
        check_everything(*c, kLimits);
        c->check();
        c.reset();
        expect(context->ledger().usage(MemoryCategory::Communication).current == 0, "staging left",
               rank, 0);
      });
      for (const RankResult& result : results) CHECK(result.error == "");
      for (const auto& state : ranks.states) {
        CHECK(state->calls_while_in_progress == 0);
        CHECK(state->calls_at_once == 0);
        CHECK(state->destroys == 1);
        CHECK(state->aborts == 0);
        CHECK((state->holds > 0) == on_device);
      }
      CHECK(ranks.stuck.empty());
    }
  }
}

TEST_CASE("a group of collectives is one launch with one number") {
  FakeRanks ranks(2);
  ranks.timeout = 20s;
  const auto results = run_ranks(2, [&](int rank) {
    const auto c = ranks.join(rank);
    meet(*c);
    std::vector<float> x(6, 1.0F);
    Mirror<float> mirror(x);
    double norm = 2.0;
    {
      comm::CollectiveGroup group(*c);
      const auto first =
          c->start_all_reduce(mirror.view(), ReduceOp::Sum, {.label = "h.0", .deadline = {}});
      const auto second = c->start_all_reduce(dense_view(&norm, DType::F64, {1}), ReduceOp::Sum,
                                              {.label = "norm", .deadline = {}});
      expect(ranks.state(rank)->launches == 1, "launched before the end of its group", rank, 0);
      expect(!first->is_done(), "done before the end of its group", rank, 0);
      CHECK_THROWS_HOLDING(InternalError, "(h.0) was waited for before its group ended",
                           first->wait());
      CHECK_THROWS_HOLDING(InternalError, "do not nest", comm::CollectiveGroup(*c));
      group.end();
      first->wait();
      second->wait();
    }
    mirror.fetch();
    expect(x == std::vector<float>(6, 2.0F) && norm == 4.0, "values", rank, 0);
    expect(ranks.state(rank)->launches == 2 && ranks.state(rank)->runs == 3, "launches", rank, 0);
    comm::CollectiveGroup(*c).end();  // an empty group
    ranks.state(rank)->collectives_end = false;
    c->barrier({.label = "after", .deadline = 300ms});
  });
  for (const RankResult& result : results) {
    CHECK(result.error.find("barrier#2 (after)") == 0);
    CHECK(result.culprits.empty());
  }
}

// Two gathers of 12 elements in one launch, with these labels.
void gather_two(comm::Communicator& c, const char* first, const char* second,
                std::chrono::milliseconds deadline = {}) {
  std::vector<float> x(12), y(12);
  const Mirror<float> one(x), other(y);
  comm::CollectiveGroup group(c);
  c.start_all_gather(one.view(), {.label = first, .deadline = {}});
  c.start_all_gather(other.view(), {.label = second, .deadline = deadline});
  group.end();
  stay_until_failure(c);
}

TEST_CASE("a group that a rank does not join is named with all its collectives") {
  FakeRanks ranks(2);
  const auto results = run_ranks(2, [&](int rank) {
    const auto c = ranks.join(rank);
    meet(*c);
    ranks.state(rank)->collectives_end = false;
    if (rank == 0) gather_two(*c, "h.1", "h.2");
    stay_until_failure(*c);
  });
  for (const RankResult& result : results) {
    CHECK(result.error ==
          "all_gather#1 (h.1 + h.2): 1 of 2 ranks arrived within 0.6 s, missing: rank 1");
    CHECK(result.culprits == std::vector<int>{1});
  }
}

TEST_CASE("ranks that group different collectives are named") {
  for (const bool alone : {false, true}) {
    CAPTURE(alone);
    FakeRanks ranks(3);
    for (const auto& state : ranks.states) state->collectives_end = false;
    const auto results = run_ranks(3, [&](int rank) {
      const auto c = ranks.join(rank);
      if (rank == 1 && alone) {
        std::vector<float> x(12);
        const Mirror<float> mirror(x);
        c->start_all_gather(mirror.view(), {.label = "h.1", .deadline = {}});
        stay_until_failure(*c);
      }
      gather_two(*c, "h.1", rank == 1 ? "h.3" : "h.2");
    });
    for (const RankResult& result : results) {
      CHECK(result.failure == CommFailure::Mismatch);
      CHECK(result.culprits == std::vector<int>{1});
      CHECK(result.error.find(alone ? "rank 1 called all_gather#0 (h.1) f32[12]"
                                    : "rank 1 called all_gather#0 (h.1 + h.3) f32[24]") !=
            std::string::npos);
    }
  }
}

TEST_CASE("after an exception within a group it can be started again, invisibly to other ranks") {
  FakeRanks ranks(2);
  ranks.timeout = 20s;
  const auto results = run_ranks(2, [&](int rank) {
    const auto c = ranks.join(rank);
    double sum = 1.0;
    const auto start = [&] {
      return c->start_all_reduce(dense_view(&sum, DType::F64, {1}), ReduceOp::Sum, {});
    };
    comm::WorkPtr dropped;
    if (rank == 1) {
      try {
        const comm::CollectiveGroup group(*c);
        dropped = start();
        throw OutOfMemory("of the next buffer");
      } catch (const OutOfMemory&) {
      }
      expect(!dropped->is_done(), "done, though it never ran", rank, 0);
      CHECK_THROWS_HOLDING(InternalError, "before its group ended", dropped->wait());
    }
    comm::CollectiveGroup group(*c);
    const auto work = start();
    group.end();
    work->wait();
    expect(sum == 2.0, "values", rank, 0);
    c->check();
  });
  for (const RankResult& result : results) CHECK(result.error == "");
}

TEST_CASE("reductions that NCCL can't do are refused, and the communicator stays usable") {
  FakeRanks ranks(1);
  const auto c = ranks.join(0);
  std::vector<BFloat16> in(4);
  std::vector<float> out(4, 1.0F);
  CHECK_THROWS_HOLDING(InvalidArgument, "expected output of dtype bf16, got f32",
                       c->reduce_scatter(view_of(in), view_of(out), {}));
  CHECK_THROWS_HOLDING(Unsupported, "all_reduce max of f32",
                       c->all_reduce(view_of(out), ReduceOp::Max, {}));
  CHECK_THROWS_HOLDING(InvalidArgument, "f64, f32 or i64",
                       c->all_reduce(view_of(in), ReduceOp::Sum, {}));
  c->all_reduce(view_of(out), ReduceOp::Sum, {});
  CHECK(out[3] == 1.0F);
  device_context().reset();
}

TEST_CASE("a CPU context has no NCCL") {
  comm::NcclOptions options;
  options.communicator.context = Context::create();
  CHECK_THROWS_HOLDING(InvalidArgument, "got one on cpu",
                       comm::make_nccl_communicator(nullptr, nullptr, 0, 1, options));
}

TEST_CASE("a missing plugin is named") {
  const auto context = fiber_context();
  CHECK_THROWS_HOLDING(Unsupported, "/nowhere/libtessera_nccl.so",
                       comm::open_nccl(*context, "/nowhere/libtessera_nccl.so"));
  CHECK_THROWS_HOLDING(Unsupported, "is not a tessera plugin",
                       comm::open_nccl(*context, test::fiber_plugin()));
}
