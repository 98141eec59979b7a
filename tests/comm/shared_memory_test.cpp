#include "comm/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "comm/bootstrap.h"
#include "comm/control/tcp_store.h"
#include "core/base/context.h"
#include "core/base/memory.h"
#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"
#include "tests/support/multiprocess.h"

using namespace tessera;
using namespace tessera::test;
using comm::SharedSegment;

namespace {

comm::SharedMemoryOptions small_chunks(std::size_t bytes = 4096) {
  comm::SharedMemoryOptions options;
  options.connect_timeout = 5s;
  options.chunk_bytes = bytes;
  return options;
}

// Bootstraps a rank with comm.backend `backend`, sums the ranks, and returns sum and backend.
std::string sum_over(const std::string& backend, int rank, int world, const std::string& port) {
  comm::LaunchEnvironment environment;
  environment.rank = rank;
  environment.world_size = world;
  environment.address = "127.0.0.1";
  environment.port = static_cast<std::uint16_t>(std::stoi(port));
  environment.run_id = "run";
  environment.rank_zero_serves = false;
  const auto group = comm::bootstrap(environment, {.backend = backend, .init_timeout = 10s});
  std::vector<double> x(1, rank + 1);
  group.communicator->all_reduce(view_of(x), comm::ReduceOp::Sum, {});
  comm::exchange(*group.store, "end", rank, world, "bye", 5s);
  return fmt::format("{} over {}{}{}", x[0], group.communicator->backend(),
                     group.why_not_shared_memory.empty() ? "" : ": ", group.why_not_shared_memory);
}

std::vector<Outcome> sums_over(const std::string& backend, const std::function<void(int)>& before) {
  Processes ranks(3, [&](int rank, const std::string& port) {
    before(rank);
    return sum_over(backend, rank, 3, port);
  });
  const comm::TcpStoreServer server({.run_id = "run"});
  ranks.go(std::to_string(server.port()));
  return ranks.wait(15s);
}

}  // namespace

TEST_CASE("holders share the segment's bytes, and slots show which ranks are alive") {
  SharedSegment first = SharedSegment::create(5000);
  SharedSegment second = SharedSegment::open(first.address());
  SharedSegment third = first.open_again();
  CHECK(first.bytes() % 4096 == 0);
  CHECK(first.bytes() >= 5000);
  CHECK(second.bytes() == first.bytes());
  CHECK(second.data() != first.data());
  CHECK(third.data() == first.data());
  CHECK(second.data()[4999] == std::byte{0});
  first.data()[4999] = std::byte{7};
  CHECK(second.data()[4999] == std::byte{7});

  first.hold(0);
  CHECK(second.is_held_elsewhere(0));
  CHECK_FALSE(first.is_held_elsewhere(0));
  CHECK_FALSE(second.is_held_elsewhere(1));
  CHECK_THROWS_HOLDING(IoError, "locking byte 0", second.hold(0));
  first.let_go(0);
  CHECK_FALSE(second.is_held_elsewhere(0));
  second.hold(0);
  { const SharedSegment ended = std::move(second); }
  CHECK_FALSE(first.is_held_elsewhere(0));
}

TEST_CASE("an address of something else is refused without opening it") {
  SharedSegment segment = SharedSegment::create(4096);
  const std::string pid = std::to_string(::getpid());
  const std::string name = segment.address().substr(segment.address().rfind('/') + 1);
  CHECK_THROWS_HOLDING(IoError, "is not the address of a segment", SharedSegment::open(""));
  CHECK_THROWS_HOLDING(IoError, "is not the address of a segment",
                       SharedSegment::open(pid + "/1/passwd"));
  // Opening for writing could block or fail on a fifo, and change a file.
  const int pipe_like = ::memfd_create("tessera-0000", MFD_CLOEXEC);
  CHECK_THROWS_HOLDING(IoError, "is not the segment here",
                       SharedSegment::open(fmt::format("{}/{}/{}", pid, pipe_like, name)));
  ::close(pipe_like);
  CHECK_THROWS_HOLDING(IoError, "opening /proc/",
                       SharedSegment::open(fmt::format("{}/{}/{}", pid, 999'999, name)));
  const std::string address = segment.address();
  { const SharedSegment ended = std::move(segment); }
  CHECK_THROWS_AS(SharedSegment::open(address), IoError);
}

TEST_CASE("every chunk size gives the same bits") {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{12'288}}) {
    CAPTURE(bytes);
    const auto store = std::make_shared<comm::MemoryStore>();
    const auto results = run_ranks(3, [&](int rank) {
      const auto options = small_chunks(bytes);
      auto segment = comm::connect_shared_segment(*store, rank, 3, options);
      const auto c =
          comm::make_shared_memory_communicator(store, rank, 3, std::move(segment), options);
      for (int round = 0; round < 20; ++round) {
        std::vector<float> x(3 * 5003), part(5003);
        std::vector<double> y(20'001);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 97) + 0.1F;
        for (double& v : y) v = 0.1 * (rank + round);
        c->reduce_scatter(view_of(x), view_of(part), {});
        c->all_reduce(view_of(y), comm::ReduceOp::Sum, {});
        for (std::size_t i = 0; i < part.size(); ++i) {
          const float v = x[static_cast<std::size_t>(rank) * 5003 + i];
          if (part[i] != (v + v) + v) throw std::runtime_error("reduce_scatter");
        }
        const double sum = (0.1 * round + 0.1 * (1 + round)) + 0.1 * (2 + round);
        for (const double v : y) {
          if (v != sum) throw std::runtime_error("all_reduce");
        }
      }
    });
    for (const RankResult& result : results) CHECK(result.error == "");
  }
}

TEST_CASE("more ranks than cores still take turns quickly") {
  const Group group("shm", 16);
  const Stopwatch watch;
  const auto results = run_ranks(16, [&](int rank) {
    const auto c = group.join(rank);
    for (int i = 0; i < 200; ++i) c->barrier({});
  });
  for (const RankResult& result : results) CHECK(result.error == "");
  CHECK(watch.elapsed() < 10s);
}

TEST_CASE("a waiting rank yields its core") {
  Processes ranks(2, [&](int rank, const std::string& port) -> std::string {
    const auto store = std::make_shared<comm::TcpStore>(
        "127.0.0.1", static_cast<std::uint16_t>(std::stoi(port)), "run", 10s);
    const auto options = small_chunks();
    auto segment = comm::connect_shared_segment(*store, rank, 2, options);
    const auto c =
        comm::make_shared_memory_communicator(store, rank, 2, std::move(segment), options);
    c->barrier({});
    const auto before = std::clock();
    if (rank == 1) std::this_thread::sleep_for(1s);
    c->barrier({});
    return std::clock() - before < CLOCKS_PER_SEC / 10 ? "idle" : "busy";
  });
  const comm::TcpStoreServer server({.run_id = "run"});
  ranks.go(std::to_string(server.port()));
  for (const Outcome& outcome : ranks.wait(10s)) CHECK(outcome.text == "idle");
}

TEST_CASE("a rank's share of the segment is booked while the communicator exists") {
  const Group group("shm", 2);
  const auto results = run_ranks(2, [&](int rank) {
    const auto context = Context::create();
    auto c = group.join(rank, {.context = context});
    const auto booked = [&] {
      return context->ledger().usage(MemoryCategory::Communication).current;
    };
    const auto wanted = static_cast<std::int64_t>(comm::shared_memory_bytes(2, {}) / 2);
    if (booked() != wanted) throw std::runtime_error(fmt::format("{} booked", booked()));
    c->barrier({});
    c.reset();
    if (booked() != 0) throw std::runtime_error("not released");
  });
  for (const RankResult& result : results) CHECK(result.error == "");
}

TEST_CASE("ranks of one host share memory by default") {
  for (const std::string backend : {"auto", "shm", "tcp"}) {
    CAPTURE(backend);
    for (const Outcome& outcome : sums_over(backend, [](int) {})) {
      CHECK(outcome.text == (backend == "tcp" ? "6 over tcp" : "6 over shm"));
    }
  }
}

TEST_CASE("if one rank can't share memory, none does: auto falls back to tcp, shm is refused") {
  const auto no_memory = [](int rank) {
    const rlimit limit{100'000, 100'000};
    if (rank == 0) ::setrlimit(RLIMIT_FSIZE, &limit);
  };
  for (const std::string backend : {"auto", "shm"}) {
    CAPTURE(backend);
    for (const Outcome& outcome : sums_over(backend, no_memory)) {
      const std::string why = "rank 0 can't share memory with the others: shared memory: ";
      CHECK(outcome.text.find(backend == "auto" ? "6 over tcp: " + why
                                                : "error: comm.backend=shm: " + why) == 0);
      CHECK(outcome.text.find("ulimit -f") != std::string::npos);
    }
  }

  const auto store = std::make_shared<comm::MemoryStore>();
  const auto results = run_ranks(2, [&](int rank) {
    comm::SharedMemoryOptions options = small_chunks();
    if (rank == 1) {  // published in place of the address
      comm::exchange(*store, "shm/address", 1, 2, "", 5s);
      comm::exchange(*store, "shm/problem", 1, 2, "no way in", 5s);
      return;
    }
    comm::connect_shared_segment(*store, rank, 2, options);
  });
  CHECK(results[0].error ==
        "not a CommError: rank 1 can't share memory with the others: no way in");
}

TEST_CASE("a rank that does not map the segment is named at the deadline") {
  comm::MemoryStore store;
  auto options = small_chunks();
  options.connect_timeout = 300ms;
  CHECK_THROWS_HOLDING(CommError, "missing: rank 1",
                       comm::connect_shared_segment(store, 0, 2, options));
  CHECK_THROWS_HOLDING(InvalidArgument, "rank 2 of 2",
                       comm::connect_shared_segment(store, 2, 2, options));
}
