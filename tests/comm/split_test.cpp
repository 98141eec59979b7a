// Subgroups of a communicator, with ranks as threads; split_faults_test.cpp covers processes.
#include "comm/split.h"

#include <atomic>
#include <latch>

#include "comm/flight_recorder.h"
#include "core/base/memory.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/meshes.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::ReduceOp;

namespace {

constexpr const char* kBackends[] = {
    "threads",         "tcp",         "shm",         "shm, one mapping",
    "threads, staged", "tcp, staged", "shm, staged", "nccl"};
constexpr Mesh kMeshes[] = {{2, 2}, {3, 2}, {1, 3}, {3, 1}};

void for_each_backend(const std::function<void(const std::string&)>& body) {
  for (const std::string backend : kBackends) {
    CAPTURE(backend);
    body(backend);
  }
}

double sum_of(comm::Communicator& c, double value) {
  std::vector<double> x(1, value);
  Mirror<double> mirror(x);
  c.all_reduce(mirror.view(), ReduceOp::Sum, {.label = "sum"});
  mirror.fetch();
  return x[0];
}

double sum(const std::vector<int>& ranks) {
  double result = 0;
  for (const int r : ranks) result += 1 << r;
  return result;
}

void expect_no_errors(const std::vector<RankResult>& results) {
  for (const RankResult& result : results) CHECK(result.error == "");
}

// Runs barriers on `c` until one fails.
void work_until_failure(comm::Communicator& c) {
  for (;;) c.barrier({.label = "work", .deadline = 20s});
}

}  // namespace

TEST_CASE("collectives of subgroups give the values of a communicator over their ranks") {
  for_each_backend([](const std::string& backend) {
    const bool is_nccl = backend == "nccl";
    const CollectiveLimits limits{.sums_in_rank_order = true, .floating_max = !is_nccl};
    for (const Mesh& mesh : kMeshes) {
      CAPTURE(mesh.rows);
      CAPTURE(mesh.columns);
      AnyRanks ranks(backend, mesh.size());
      expect_no_errors(run_ranks(mesh.size(), [&](int rank) {
        const MeshRank m(ranks.join(rank), mesh);
        expect(m.shard->rank() == rank % mesh.columns && m.shard->world_size() == mesh.columns,
               "row", rank, 0);
        expect(m.replicate->rank() == rank / mesh.columns && m.replicate->world_size() == mesh.rows,
               "column", rank, 0);
        constexpr std::int64_t kCounts[] = {0, 3, 1000, 20011};
        check_everything(*m.shard, limits, kCounts);
        check_everything(*m.replicate, limits, kCounts);
        // Values that differ between the groups.
        expect(sum_of(*m.shard, 1 << rank) == sum(mesh.row_of(rank)), "row's sum", rank, 0);
        expect(sum_of(*m.replicate, 1 << rank) == sum(mesh.column_of(rank)), "column's sum", rank,
               0);
        expect(sum_of(*m.world, 1) == mesh.size(), "sum of all", rank, 0);
      }));
    }
  });
}

TEST_CASE("collectives of a communicator and its subgroups overlap") {
  for (const std::string backend : {"threads", "tcp", "shm", "shm, staged"}) {
    CAPTURE(backend);
    constexpr Mesh kMesh{2, 2};
    AnyRanks ranks(backend, kMesh.size());
    expect_no_errors(run_ranks(kMesh.size(), [&](int rank) {
      const MeshRank m(ranks.join(rank), kMesh);
      // The world's collective can't end before the subgroups'.
      comm::WorkPtr early;
      if (rank == 0) early = m.world->start_barrier({.label = "all"});
      const auto late = rank % 2 == 0 ? m.replicate.get() : m.shard.get();
      const auto soon = rank % 2 == 0 ? m.shard.get() : m.replicate.get();
      for (int round = 0; round < 20; ++round) {
        std::vector<double> x(3000, 1 << rank), y = x;
        const auto first = soon->start_all_reduce(view_of(x), ReduceOp::Sum, {.label = "h"});
        const auto second = late->start_all_reduce(view_of(y), ReduceOp::Sum, {.label = "h"});
        second->wait();
        first->wait();
        const auto& rows = rank % 2 == 0 ? x : y;
        const auto& columns = rank % 2 == 0 ? y : x;
        expect(rows[2999] == sum(kMesh.row_of(rank)), "row's sum", rank, round);
        expect(columns[0] == sum(kMesh.column_of(rank)), "column's sum", rank, round);
      }
      if (rank != 0) early = m.world->start_barrier({.label = "all"});
      early->wait();
    }));
  }
}

TEST_CASE("ranks that disagree on the members all throw the same error, which names the odd one") {
  for_each_backend([](const std::string& backend) {
    AnyRanks ranks(backend, 4);
    const auto results = run_ranks(4, [&](int rank) {
      const auto c = ranks.join(rank);
      const auto earlier = c->split(Mesh{2, 2}.row_of(rank), "shard");
      auto members = Mesh{2, 2}.column_of(rank);
      if (rank == 1) members = {0, 1};
      try {
        c->split(members, "replicate");
      } catch (const CommError&) {
        try {
          earlier->barrier({});
        } catch (const CommError& error) {
          expect(error.culprits() == std::vector<int>{1}, "an earlier group's culprit", rank, 0);
          throw;
        }
      }
    });
    for (const RankResult& result : results) {
      CAPTURE(result.error);
      CHECK(result.failure == CommFailure::Mismatch);
      CHECK(result.culprits == std::vector<int>{1});
      CHECK(result.error ==
            "split: ranks disagree on their groups: rank 1 joins the replicate group of ranks 0, "
            "1, but rank 0 joins the replicate group of ranks 0, 2; every rank must pass the "
            "members of its own group");
    }
  });
}

TEST_CASE("ranks that disagree on kind or order of splits are named") {
  for_each_backend([](const std::string& backend) {
    for (const bool is_order : {false, true}) {
      CAPTURE(is_order);
      AnyRanks ranks(backend, 4);
      const auto results = run_ranks(4, [&](int rank) {
        const auto c = ranks.join(rank);
        if (rank == 2 && is_order) {
          c->barrier({.label = "start"});
        } else {
          c->split({0, 1, 2, 3}, rank == 2 ? "replicate" : "shard");
        }
      });
      for (const RankResult& result : results) {
        CHECK(result.failure == CommFailure::Mismatch);
        CHECK(result.culprits == std::vector<int>{2});
        CHECK(result.error.find(is_order ? "rank 2 called barrier#0 (start)"
                                         : "rank 2 called all_gather#0 (split replicate)") !=
              std::string::npos);
        CHECK(result.error.find("where 3 of 4 ranks called all_gather#0 (split shard)") !=
              std::string::npos);
      }
    }
  });
}

TEST_CASE("the culprit of a disagreement joins a group without being its member") {
  const auto blamed = [](const std::vector<std::vector<int>>& claimed,
                         const comm::Subgroup* group = nullptr) {
    const auto error = comm::find_split_mismatch(claimed, "shard", group);
    return error ? error->culprits() : std::vector<int>{};
  };
  using Ranks = std::vector<int>;
  CHECK(blamed({{0, 1}, {0, 1}, {2}, {3}}).empty());
  CHECK(blamed({{0, 2}, {0, 1}, {0, 2}, {1, 3}}) == Ranks{1});
  CHECK(blamed({{0, 1}, {1, 2}, {0, 2}}) == Ranks{0, 1, 2});
  CHECK(blamed({{0, 1}, {0, 1}, {0, 1, 2}}) == Ranks{2});
  const comm::Subgroup group{.kind = "shard", .ranks = {4, 6, 8, 9}};
  CHECK(blamed({{0, 2}, {0, 1}, {0, 2}, {1, 3}}, &group) == Ranks{6});
}

TEST_CASE("invalid members and kinds are refused, and the communicator stays usable") {
  for (const char* backend : {"threads", "tcp", "shm", "threads, staged", "nccl"}) {
    AnyRanks ranks(backend, 2);
    expect_no_errors(run_ranks(2, [&](int rank) {
      const auto c = ranks.join(rank);
      for (const std::vector<int>& members :
           {std::vector<int>{}, {1 - rank}, {1, 0}, {0, 0, 1}, {0, 1, 2}, {-1, 0, 1}}) {
        CHECK_THROWS_HOLDING(InvalidArgument, "expected ascending ranks of a group of 2",
                             c->split(members, "shard"));
      }
      CHECK_THROWS_HOLDING(InvalidArgument, "1 to 24 bytes", c->split({0, 1}, ""));
      CHECK_THROWS_HOLDING(InvalidArgument, "1 to 24 bytes",
                           c->split({0, 1}, std::string(25, 'x')));
      c->split({0, 1}, "shard")->barrier({});
    }));
  }
}

TEST_CASE("a rank that does not arrive in a subgroup fails all ranks, which name its world rank") {
  for_each_backend([](const std::string& backend) {
    constexpr Mesh kMesh{2, 2};
    AnyRanks ranks(backend, kMesh.size());
    std::latch failed(3);
    const Stopwatch watch;
    const auto results = run_ranks(kMesh.size(), [&](int rank) {
      const MeshRank m(ranks.join(rank), kMesh);
      m.shard->barrier({.label = "start"});
      // The fake's device waits for all ranks.
      if (ranks.fake() != nullptr) ranks.fake()->state(rank)->collectives_end = rank < 2;
      if (rank == 3) return failed.wait();
      try {
        if (rank == 2) {
          m.shard->barrier({.label = "h.1", .deadline = 300ms});
        } else {
          work_until_failure(*m.shard);
        }
      } catch (const CommError& error) {
        failed.count_down();
        for (comm::Communicator* c : m.all()) {
          try {
            c->barrier({});
            expect(false, "alive", rank, 0);
          } catch (const CommError& later) {
            expect(later.culprits() == error.culprits(), "culprits", rank, 0);
          }
        }
        throw;
      }
    });
    CHECK(watch.elapsed() < kSlack * 10s);
    for (int rank : {0, 1, 2}) {
      const RankResult& result = results[static_cast<std::size_t>(rank)];
      CAPTURE(result.error);
      CHECK(result.failure == CommFailure::Timeout);
      CHECK(result.culprits == std::vector<int>{3});
      CHECK(
          result.error.starts_with("barrier#1 (h.1, shard group of ranks 2, 3): 1 of 2 ranks "
                                   "arrived within 0.3 s, missing: rank 3"));
    }
  });
}

TEST_CASE("ranks that call different collectives of a subgroup are named by their world ranks") {
  for_each_backend([](const std::string& backend) {
    constexpr Mesh kMesh{2, 2};
    AnyRanks ranks(backend, kMesh.size());
    const auto results = run_ranks(kMesh.size(), [&](int rank) {
      const MeshRank m(ranks.join(rank), kMesh);
      if (ranks.fake() != nullptr) ranks.fake()->state(rank)->collectives_end = rank % 2 == 0;
      std::vector<float> x(12);
      const Mirror<float> mirror(x);
      if (rank % 2 == 0) work_until_failure(*m.replicate);
      m.replicate->broadcast(mirror.view(), rank == 3 ? 1 : 0, {.label = "h.1"});
    });
    for (const RankResult& result : results) {
      CAPTURE(result.error);
      CHECK(result.failure == CommFailure::Mismatch);
      CHECK(result.culprits == std::vector<int>{3});
      CHECK(result.error.find("ranks disagree on collective #0 of the replicate group of ranks 1, "
                              "3: rank 3 called broadcast#0 (h.1) f32[12] from rank 3, where 1 of "
                              "2 ranks called broadcast#0 (h.1) f32[12] from rank 1") !=
            std::string::npos);
    }
  });
}

TEST_CASE("an abort of one communicator of a rank ends all communicators of all ranks") {
  for_each_backend([](const std::string& backend) {
    for (const std::size_t aborted : {0U, 1U, 2U}) {
      CAPTURE(aborted);
      constexpr Mesh kMesh{2, 2};
      AnyRanks ranks(backend, kMesh.size());
      const Stopwatch watch;
      const auto results = run_ranks(kMesh.size(), [&](int rank) {
        const MeshRank m(ranks.join(rank), kMesh);
        if (rank == 1) {
          std::this_thread::sleep_for(20ms);
          m.all()[aborted]->abort("the disk is full");
        }
        try {
          work_until_failure(rank % 2 == 0 ? *m.shard : *m.replicate);
        } catch (const CommError&) {
          for (comm::Communicator* c : m.all()) {
            try {
              c->barrier({});
            } catch (const CommError& error) {
              expect(error.culprits() == std::vector<int>{1}, "culprits", rank, 0);
              continue;
            }
            expect(false, "alive", rank, 0);
          }
          throw;
        }
      });
      CHECK(watch.elapsed() < kSlack * 5s);
      for (const RankResult& result : results) {
        CHECK(result.failure == CommFailure::Aborted);
        CHECK(result.error.find("rank 1 aborted communication: the disk is full") !=
              std::string::npos);
      }
    }
  });
}

TEST_CASE("a subgroup can be split again; errors still name ranks of the world") {
  for_each_backend([](const std::string& backend) {
    AnyRanks ranks(backend, 6);
    std::latch failed(5);
    const auto results = run_ranks(6, [&](int rank) {
      const auto world = ranks.join(rank);
      const int first = rank / 3 * 3;
      const auto half = world->split({first, first + 1, first + 2}, "half");
      const auto rest =
          half->split(half->rank() == 0 ? std::vector<int>{0} : std::vector<int>{1, 2}, "rest");
      expect(sum_of(*rest, 1 << rank) ==
                 (half->rank() == 0 ? 1 << rank : (1 << (first + 1)) + (1 << (first + 2))),
             "sum", rank, 0);
      if (ranks.fake() != nullptr) ranks.fake()->state(rank)->collectives_end = rank < 4;
      if (rank == 5) return failed.wait();
      try {
        if (rank == 4) rest->barrier({.label = "h.1", .deadline = 300ms});
        work_until_failure(rank < 3 ? *half : *world);
      } catch (const CommError&) {
        failed.count_down();
        throw;
      }
    });
    for (int rank = 0; rank < 5; ++rank) {
      const RankResult& result = results[static_cast<std::size_t>(rank)];
      CAPTURE(result.error);
      CHECK(result.culprits == std::vector<int>{5});
      CHECK(result.error.starts_with("barrier#1 (h.1, rest group of ranks 4, 5): 1 of 2 ranks "));
    }
  });
}

TEST_CASE("subgroups number their collectives from 0, and are recorded and reported as under way") {
  for (const std::string backend : {"threads", "tcp", "shm", "threads, staged", "nccl"}) {
    CAPTURE(backend);
    constexpr Mesh kMesh{2, 2};
    AnyRanks ranks(backend, kMesh.size());
    expect_no_errors(run_ranks(kMesh.size(), [&](int rank) {
      const auto recorder = comm::FlightRecorder::create({}, {});
      auto world = ranks.join(rank);
      world->set_recorder(recorder);
      const MeshRank m(std::move(world), kMesh);
      m.shard->barrier({.label = "h.0"});
      m.shard->barrier({.label = "h.1"});
      m.replicate->barrier({.label = "h.1"});
      m.world->barrier({.label = "end"});
      if (backend != "nccl" && rank == 0) {
        const auto work = m.shard->start_barrier({.label = "h.2"});
        expect(m.world->under_way() == "barrier#2 (h.2, shard group of ranks 0, 1)", "under way",
               rank, 0);
        expect(m.shard->under_way() == m.world->under_way() && m.replicate->under_way().empty(),
               "under way in groups", rank, 0);
        m.replicate->barrier({.label = "go"});
        work->wait();
        expect(m.world->waited_ns() >= m.shard->waited_ns() + m.replicate->waited_ns() &&
                   m.shard->waited_ns() > 0,
               "waited", rank, 0);
      } else {
        if (backend != "nccl" && rank == 1) std::this_thread::sleep_for(30ms);
        m.shard->barrier({.label = "h.2"});
        m.replicate->barrier({.label = "go"});
      }
      const auto is_in_record = [&](const std::string& text) {
        for (const auto& c : recorder->snapshot().collectives) {
          if (c.describe() == text) return true;
        }
        return false;
      };
      const std::string row = rank < 2 ? "0, 1" : "2, 3", column = rank % 2 == 0 ? "0, 2" : "1, 3";
      for (const std::string& text :
           {std::string("barrier#4 (end)"), "barrier#0 (h.0) of the shard group of ranks " + row,
            "barrier#1 (h.1) of the shard group of ranks " + row,
            "barrier#0 (h.1) of the replicate group of ranks " + column}) {
        if (!is_in_record(text)) throw std::runtime_error("not recorded: " + text);
      }
    }));
  }
}

TEST_CASE("a group of one makes no connection and fails with its parent") {
  for (const std::string backend : {"threads", "tcp", "shm", "threads, staged", "nccl", "single"}) {
    CAPTURE(backend);
    const int world = backend == "single" ? 1 : 3;
    AnyRanks ranks(backend, world);
    expect_no_errors(run_ranks(world, [&](int rank) {
      const auto c = ranks.join(rank);
      const auto alone = c->split({rank}, "shard");
      expect(alone->rank() == 0 && alone->world_size() == 1, "identity", rank, 0);
      if (backend != "nccl") check_everything(*alone);
      if (backend == "tcp") expect(alone->backend() == "single", "backend", rank, 0);
      if (rank == 0) c->abort("enough");
      try {
        for (;;) c->barrier({});
      } catch (const CommError&) {
      }
      try {
        alone->barrier({});
      } catch (const CommError& error) {
        return expect(error.culprits() == std::vector<int>{0}, "culprits", rank, 0);
      }
      expect(false, "alive", rank, 0);
    }));
  }
}

TEST_CASE("a rank that does not split is named at the deadline") {
  for_each_backend([](const std::string& backend) {
    AnyRanks ranks(backend, 3, 500ms);
    std::latch failed(2);
    const auto results = run_ranks(3, [&](int rank) {
      const auto c = ranks.join(rank);
      c->barrier({.label = "start", .deadline = 10s});
      if (rank == 1) return failed.wait();
      try {
        c->split({0, 1, 2}, "shard");
      } catch (const CommError&) {
        failed.count_down();
        throw;
      }
    });
    for (const std::size_t rank : {0U, 2U}) {
      CHECK(results[rank].culprits == std::vector<int>{1});
      CHECK(results[rank].error.starts_with("all_gather#1 (split shard): 2 of 3 ranks arrived"));
    }
  });
}

TEST_CASE("members that do not connect are named by their world ranks") {
  const comm::Membership membership{
      std::make_shared<comm::Subgroup>(comm::Subgroup{"shard", {2, 5, 7}, "tcp/0 shard"}),
      std::make_shared<comm::FailureDomain>()};
  const auto enter = [&](auto options) {
    options.connect_timeout = 200ms;
    options.enter(membership);
    return options;
  };
  const auto store = std::make_shared<comm::MemoryStore>();
  std::vector<RankResult> results;
  for (const bool is_tcp : {true, false}) {
    const auto both = run_ranks(2, [&](int rank) {
      if (is_tcp) {
        comm::make_tcp_communicator(store, rank, 3, enter(comm::TcpOptions()));
      } else {
        comm::connect_shared_segment(*store, rank, 3, enter(comm::SharedMemoryOptions()));
      }
    });
    results.insert(results.end(), both.begin(), both.end());
    store->leave("tcp/0 shard/address", 1);  // removes the keys of the first attempt
  }
  for (const RankResult& result : results) {
    CHECK(result.failure == CommFailure::Timeout);
    CHECK(result.culprits == std::vector<int>{7});
    CHECK(result.error.find("2 of 3 ranks answered within") != std::string::npos);
    CHECK(result.error.find("missing: rank 7") != std::string::npos);
  }
}

namespace {

// Rank 3's view of the store: requests for its subgroup fail or come late.
class TroubledStore final : public comm::Store {
 public:
  TroubledStore(std::shared_ptr<comm::Store> store, std::chrono::milliseconds delay)
      : store_(std::move(store)), delay_(delay) {}
  void set(const std::string& key, std::string_view value) override {
    look(key);
    store_->set(key, value);
  }
  std::string get(const std::string& key, std::chrono::milliseconds deadline) override {
    look(key);
    return store_->get(key, deadline);
  }
  bool has(const std::string& key) override { return store_->has(key); }
  void leave(const std::string& name, int readers) override { store_->leave(name, readers); }

 private:
  void look(const std::string& key) const {
    if (key.find("shard group of ranks 2, 3") == key.npos) return;
    if (delay_ == 0ms) throw IoError("too many open files");
    if (!late_.exchange(true)) std::this_thread::sleep_for(delay_);
  }
  mutable std::atomic<bool> late_ = false;
  const std::shared_ptr<comm::Store> store_;
  const std::chrono::milliseconds delay_;
};

}  // namespace

TEST_CASE("a rank that fails or is late while its group connects is named by all ranks") {
  for (const std::string backend : {"tcp", "shm"}) {
    for (const auto delay : {0ms, 3000ms}) {
      CAPTURE(backend);
      CAPTURE(delay.count());
      const auto store = std::make_shared<comm::MemoryStore>();
      const Stopwatch watch;
      const auto results = run_ranks(4, [&](int rank) {
        const auto fill = [](auto options) {
          options.communicator.timeout = 20s;
          options.connect_timeout = 1s;
          return options;
        };
        std::shared_ptr<comm::Store> own = store;
        if (rank == 3) own = std::make_shared<TroubledStore>(store, delay);
        std::unique_ptr<comm::Communicator> c;
        if (backend == "tcp") {
          c = comm::make_tcp_communicator(own, rank, 4, fill(comm::TcpOptions()));
        } else {
          const auto options = fill(comm::SharedMemoryOptions());
          auto segment = comm::connect_shared_segment(*own, rank, 4, options);
          c = comm::make_shared_memory_communicator(own, rank, 4, std::move(segment), options);
        }
        c->split(Mesh{2, 2}.row_of(rank), "shard");
      });
      CHECK(watch.elapsed() < kSlack * 5s);
      for (const RankResult& result : results) {
        CAPTURE(result.error);
        CHECK(result.culprits == std::vector<int>{3});
        CHECK(result.error.find(delay == 0ms ? "rank 3 can't connect the shard group of ranks 2, "
                                               "3: too many open files"
                                             : "missing: rank 3") != std::string::npos);
      }
    }
  }
}

TEST_CASE("a rank that can't connect its group fails all ranks") {
  AnyRanks ranks("nccl", 4);
  const auto results = run_ranks(4, [&](int rank) {
    const auto c = ranks.join(rank);
    if (rank == 3) ranks.fake()->state(rank)->fails_to_connect = true;
    c->split(Mesh{2, 2}.row_of(rank), "shard");
  });
  for (const RankResult& result : results) {
    CHECK(result.culprits == std::vector<int>{3});
    CHECK(result.error.find("does not start on rank 3: no such device") != std::string::npos);
  }
}

TEST_CASE("the memory of subgroups is booked and given back") {
  AnyRanks ranks("shm", 2);
  const Group group("shm", 2);
  expect_no_errors(run_ranks(2, [&](int rank) {
    const auto context = Context::create();
    const auto booked = [&] {
      return context->ledger().usage(MemoryCategory::Communication).current;
    };
    const auto c = group.join(rank, {.context = context});
    const auto before = booked();
    auto shard = c->split({0, 1}, "shard");
    expect(booked() == 2 * before && before > 0, "booked", rank, booked());
    shard.reset();
    expect(booked() == before, "given back", rank, booked());
  }));
}

TEST_CASE("many splits of the same kind, and subgroups that outlive their parent") {
  for_each_backend([](const std::string& backend) {
    AnyRanks ranks(backend, 2);
    expect_no_errors(run_ranks(2, [&](int rank) {
      auto c = ranks.join(rank);
      for (int i = 0; i < 3; ++i) {
        const auto shard = c->split({0, 1}, "shard");
        expect(sum_of(*shard, 1 << rank) == 3, "sum", rank, i);
      }
      const auto kept = c->split({0, 1}, "shard");
      kept->barrier({});
      c.reset();
      expect(sum_of(*kept, 1 << rank) == 3, "sum after the parent", rank, 0);
    }));
  });
}
