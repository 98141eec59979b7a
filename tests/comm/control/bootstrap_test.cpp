#include "comm/bootstrap.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "comm/control/socket.h"
#include "comm/control/tcp_store.h"
#include "tests/comm/fake_nccl.h"
#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"
#include "tests/support/multiprocess.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::test;
using comm::LaunchEnvironment;

namespace {

// Unique per test process, since ranks probe several ports and parallel tests may serve stores
// there.
const std::string kRun = fmt::format("run-{}", ::getpid());

LaunchEnvironment environment(int rank, int world, int port, bool rank_zero_serves) {
  LaunchEnvironment e;
  e.rank = e.local_rank = rank;
  e.world_size = e.local_world_size = world;
  e.address = world > 1 ? "127.0.0.1" : "";
  e.port = static_cast<std::uint16_t>(port);
  e.ports = rank_zero_serves ? 16 : 1;
  e.run_id = kRun;
  e.rank_zero_serves = rank_zero_serves;
  return e;
}

std::string sum_of_ranks(comm::RankGroup group) {
  std::vector<double> x(1, group.communicator->rank() + 1);
  Mirror<double> mirror(x);
  group.communicator->all_reduce(mirror.view(), comm::ReduceOp::Sum, {});
  mirror.fetch();
  comm::exchange(*group.store, "end", group.communicator->rank(), group.communicator->world_size(),
                 "bye", 5s);
  return fmt::format("{} of {} over {}", x[0], group.ranks.size(), group.communicator->backend());
}

// How ranks on fiber devices bootstrap.
struct OnDevice {
  std::string backend = "auto";
  int devices = 8;        // per host, assigned round-robin
  int without_nccl = -1;  // rank without NCCL
};

// Outcomes of three ranks, with the number of times that each opened NCCL.
std::vector<Outcome> bootstrapped(const OnDevice& how) {
  Processes ranks(3, [&](int rank, const std::string& port) {
    device_context() = Context::create(
        {.device = {DeviceType::CUDA, rank % how.devices}, .plugin = test::fiber_plugin()});
    int opened = 0;
    comm::BootstrapOptions options;
    options.backend = how.backend;
    options.init_timeout = 5s;
    options.communicator.context = device_context();
    // Fake NCCL, limited to this process: the ranks do not communicate.
    options.open_nccl = [&](Context&) -> std::unique_ptr<comm::NcclDriver> {
      ++opened;
      if (rank == how.without_nccl) throw Unsupported("no libnccl.so.2");
      return std::make_unique<FakeNccl>(std::make_shared<FakeNcclState>(),
                                        comm::make_single_communicator());
    };
    std::string text;
    try {
      comm::RankGroup group =
          comm::bootstrap(environment(rank, 3, std::stoi(port), false), options);
      text = group.why_not_nccl.empty() ? "" : "; " + group.why_not_nccl;
      text = sum_of_ranks(std::move(group)) + text;
    } catch (const Unsupported& error) {
      text = error.what();
    }
    device_context().reset();
    return fmt::format("{} [{}]", text, opened);
  });
  const comm::TcpStoreServer server({.run_id = kRun});
  ranks.go(std::to_string(server.port()));
  return ranks.wait(15s);
}

}  // namespace

TEST_CASE("one rank needs no network") {
  const auto group = comm::bootstrap(environment(0, 1, 0, true), {});
  CHECK(group.communicator->backend() == "single");
  CHECK(group.communicator->world_size() == 1);
  CHECK(group.ranks.size() == 1);
  group.store->set("a", "b");
}

TEST_CASE("unavailable backends are refused in one sentence") {
  CHECK_THROWS_HOLDING(Unsupported, "comm.backend=nccl needs ranks that compute on GPUs",
                       comm::bootstrap(environment(0, 1, 0, true), {.backend = "nccl"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "expected auto, shm, tcp or nccl, got 'mpi'",
                       comm::bootstrap(environment(0, 1, 0, true), {.backend = "mpi"}));
}

TEST_CASE("all ranks of a start share a start id, which differs between starts") {
  std::vector<std::string> seen;
  for (const int world : {1, 3, 3}) {
    Processes ranks(world, [&](int rank, const std::string& port) {
      std::string told;
      comm::BootstrapOptions options;
      options.on_start_id = [&](std::uint64_t id) { told += std::to_string(id) + ";"; };
      sum_of_ranks(comm::bootstrap(environment(rank, world, std::stoi(port), false), options));
      return told;
    });
    const comm::TcpStoreServer server({.run_id = kRun});
    ranks.go(std::to_string(server.port()));
    const auto outcomes = ranks.wait(20s);
    const std::string& first = outcomes[0].text;
    CHECK(first != "");
    CHECK(first != "0;");
    for (const Outcome& outcome : outcomes) CHECK(outcome.text == first);
    CHECK(std::ranges::count(seen, first) == 0);
    seen.push_back(first);
  }
}

TEST_CASE("processes meet at the launcher's store, and at rank 0's") {
  for (int i = 0; i < 6; ++i) {
    const bool rank_zero_serves = i % 2 == 1;
    const int world = 2 + i / 2;
    CAPTURE(rank_zero_serves);
    CAPTURE(world);
    Processes ranks(world, [&](int rank, const std::string& port) {
      return sum_of_ranks(
          comm::bootstrap(environment(rank, world, std::stoi(port), rank_zero_serves), {}));
    });
    // If rank 0 serves the store, ranks also probe the next ports.
    std::optional<comm::TcpStoreServer> server;
    if (!rank_zero_serves) server.emplace(comm::TcpStoreServerOptions{.run_id = kRun});
    // A store of another run occupies this port, so rank 0 uses the next one.
    const comm::TcpStoreServer other({.run_id = "another run"});
    ranks.go(std::to_string(server ? server->port() : other.port()));
    for (const Outcome& outcome : ranks.wait(15s)) {
      CHECK(outcome.text == fmt::format("{} of {} over shm", world * (world + 1) / 2, world));
    }
  }
}

TEST_CASE("a rank killed in a subgroup ends the run of all ranks, also of the other groups") {
  for (const std::string backend : {"shm", "tcp"}) {
    CAPTURE(backend);
    Processes ranks(4, [&](int rank, const std::string& port) -> std::string {
      comm::BootstrapOptions options;
      options.backend = backend;
      const comm::RankGroup group =
          comm::bootstrap(environment(rank, 4, std::stoi(port), true), options);
      const int first = rank / 2 * 2;
      const auto shard = group.communicator->split({first, first + 1}, "shard");
      shard->barrier({});
      std::string where;
      try {
        for (int i = 0;; ++i) {
          if (rank == 3 && i == 20) ::raise(SIGKILL);
          const auto work = shard->start_barrier({.label = "h.1"});
          where = group.status->state().collective;
          work->wait();
          std::this_thread::sleep_for(5ms);
        }
      } catch (const CommError& error) {
        if (rank == 2 && where.find("h.1, shard group of ranks 2, 3") == where.npos)
          return "not in the status: " + where;
        try {
          group.communicator->barrier({});
        } catch (const CommError& later) {
          if (later.culprits() == error.culprits() && error.culprits() == std::vector<int>{3})
            return error.what();
        }
        return std::string("wrong: ") + error.what();
      }
    });
    std::uint16_t port = 0;
    {
      const comm::TcpStoreServer gone({.run_id = kRun});
      port = gone.port();
    }
    ranks.go(std::to_string(port));
    const auto outcomes = ranks.wait(kSlack * 10s);
    for (const std::size_t r : {0U, 1U, 2U}) {
      CAPTURE(outcomes[r].text);
      CHECK(outcomes[r].in_time);
      CHECK(outcomes[r].text.starts_with("lost rank 3 ("));
      CHECK(outcomes[r].text == outcomes[0].text);
    }
  }
}

TEST_CASE("ranks on separate devices use NCCL, by default and on request") {
  for (const char* backend : {"auto", "nccl"}) {
    const auto outcomes = bootstrapped({.backend = backend});
    for (std::size_t r = 0; r < 3; ++r) {  // each fake NCCL sums its own rank only
      CHECK(outcomes[r].text == fmt::format("{} of 3 over nccl [1]", r + 1));
    }
  }
}

TEST_CASE("ranks on devices communicate through the host on request") {
  for (const std::string backend : {"shm", "tcp"}) {
    for (const Outcome& outcome : bootstrapped({.backend = backend})) {
      CHECK(outcome.text == fmt::format("6 of 3 over host-staged {} [0]", backend));
    }
  }
}

TEST_CASE("if NCCL is missing on one rank, all ranks communicate through the host and say why") {
  for (const Outcome& outcome : bootstrapped({.without_nccl = 1})) {
    CHECK(outcome.text == "6 of 3 over host-staged shm; rank 1: no libnccl.so.2 [1]");
  }
  for (const Outcome& outcome : bootstrapped({.backend = "nccl", .without_nccl = 1})) {
    CHECK(outcome.text == "comm.backend=nccl: rank 1: no libnccl.so.2 [1]");
  }
}

TEST_CASE("ranks that share a device are named before NCCL is opened") {
  for (const Outcome& outcome : bootstrapped({.backend = "nccl", .devices = 2})) {
    CHECK(outcome.text.find("comm.backend=nccl: rank 0 (") == 0);
    CHECK(outcome.text.find("and rank 2 (pid ") != std::string::npos);
    CHECK(outcome.text.find("compute on the same device, fibers-0; nccl needs one for each rank "
                            "[0]") != std::string::npos);
  }
  for (const Outcome& outcome : bootstrapped({.devices = 2})) {
    CHECK(outcome.text.find("6 of 3 over host-staged shm; rank 0 (") == 0);
    CHECK(outcome.text.find("same device, fibers-0") != std::string::npos);
  }
  ::setenv("TESSERA_NCCL_SHARE_DEVICES", "1", 1);
  for (const Outcome& outcome : bootstrapped({.backend = "nccl", .devices = 2})) {
    CHECK(outcome.text.find("of 3 over nccl [1]") != std::string::npos);
  }
  ::unsetenv("TESSERA_NCCL_SHARE_DEVICES");
}

TEST_CASE("a single rank on a device needs no other process") {
  device_context() = fiber_context();
  comm::BootstrapOptions options;
  options.communicator.context = device_context();
  CHECK(sum_of_ranks(comm::bootstrap(environment(0, 1, 0, true), options)) ==
        "1 of 1 over host-staged single");
  device_context().reset();
}

TEST_CASE("the address for other hosts is an interface's, never loopback") {
  const std::string nowhere(70, 'x');
  CHECK(comm::address_towards({"127.0.1.1", "::1", nowhere}) == std::nullopt);
  ifaddrs* first = nullptr;
  REQUIRE(::getifaddrs(&first) == 0);
  for (const ifaddrs* i = first; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET ||
        (i->ifa_flags & IFF_UP) == 0 || (i->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    const std::string own =
        ::inet_ntoa(reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr);
    CHECK(comm::address_towards({"127.0.0.1", nowhere, own}) == own);
  }
  ::freeifaddrs(first);
}

TEST_CASE("rank 0 waits for its configured address to appear, then reports it") {
  LaunchEnvironment e = environment(0, 2, 900, true);
  e.address = std::string(70, 'x');
  const Stopwatch watch;
  CHECK_THROWS_HOLDING(CommError, "host '" + e.address + "' has no address",
                       comm::bootstrap(e, {.init_timeout = 300ms}));
  CHECK(watch.wall() >= 300ms);
  CHECK(watch.elapsed() < 3s);
}

TEST_CASE("a rank that never starts is named by all others in time") {
  Processes ranks(3, [&](int rank, const std::string& port) -> std::string {
    if (rank == 1) return "absent";
    try {
      comm::bootstrap(environment(rank, 3, std::stoi(port), false), {.init_timeout = 600ms});
    } catch (const CommError& error) {
      return error.what();
    }
    return "no error";
  });
  const comm::TcpStoreServer server({.run_id = kRun});
  const Stopwatch watch;
  ranks.go(std::to_string(server.port()));
  const auto outcomes = ranks.wait(8s);
  CHECK(watch.elapsed() < 4s);
  CHECK(outcomes[0].text == outcomes[2].text);
  CHECK(outcomes[0].text.find("rendezvous: 2 of 3 ranks arrived within") == 0);
  CHECK(outcomes[0].text.find("missing: rank 1") != std::string::npos);
}

TEST_CASE("no store answers: rank 0 is missing if it serves; a launcher is no rank") {
  std::uint16_t port = 0;
  {
    const comm::TcpStoreServer gone({.run_id = kRun});
    port = gone.port();
  }
  for (const bool rank_zero_serves : {true, false}) {
    CAPTURE(rank_zero_serves);
    LaunchEnvironment e = environment(1, 2, port, rank_zero_serves);
    e.ports = 1;  // parallel tests may serve on the next ones
    try {
      comm::bootstrap(e, {.init_timeout = 300ms});
      FAIL("no error");
    } catch (const CommError& error) {
      CHECK(error.failure() == CommFailure::Timeout);
      CHECK(std::string(error.what())
                .find(fmt::format("no store answered at 127.0.0.1:{} within ", port)) == 0);
      CHECK(error.culprits() == (rank_zero_serves ? std::vector<int>{0} : std::vector<int>{}));
    }
  }
}

TEST_CASE("ranks with different configurations do not start") {
  Processes ranks(2, [&](int rank, const std::string& port) -> std::string {
    try {
      comm::bootstrap(environment(rank, 2, std::stoi(port), false),
                      {.init_timeout = 5s, .fingerprint = rank == 0 ? "lr = 1" : "lr = 2"});
    } catch (const CommError& error) {
      return error.what();
    }
    return "no error";
  });
  const comm::TcpStoreServer server({.run_id = kRun});
  ranks.go(std::to_string(server.port()));
  for (const Outcome& outcome : ranks.wait(8s)) {
    CHECK(outcome.text.find("one field: lr: rank 1 (") != std::string::npos);
    CHECK(outcome.text.find("has '2', rank 0 (") != std::string::npos);
  }
}

TEST_CASE("without a token no rank serves other hosts, and every rank says so at once") {
  for (const int rank : {0, 1}) {
    LaunchEnvironment e = environment(rank, 2, 23451, true);
    const Stopwatch watch;
    for (const char* bind : {"0.0.0.0", "::"}) {
      e.bind = bind;
      CHECK_THROWS_HOLDING(InvalidArgument, "export TESSERA_TOKEN=$(openssl rand -hex 32)",
                           comm::bootstrap(e, {.init_timeout = 20s}));
    }
    e.bind.clear();
    e.address = "192.0.2.1";  // TEST-NET-1: unassigned
    CHECK_THROWS_HOLDING(InvalidArgument, "192.0.2.1, which other hosts can reach, without a token",
                         comm::bootstrap(e, {.init_timeout = 20s}));
    CHECK(watch.elapsed() < 5s);
  }
}

TEST_CASE("with a token rank 0 serves on all addresses, and ranks with another token are refused") {
  Processes ranks(3, [&](int rank, const std::string& port) -> std::string {
    LaunchEnvironment e = environment(rank % 2, 2, std::stoi(port), true);
    e.ports = rank == 2 ? 1 : 16;
    e.bind = "0.0.0.0";
    e.token = rank == 2 ? "another token of 32 characters.." : "the token of this run, 34 letters.";
    if (rank < 2) return sum_of_ranks(comm::bootstrap(e, {.init_timeout = 20s}));
    e.rank = 1;
    try {
      comm::bootstrap(e, {.init_timeout = 2s});
    } catch (const CommError& error) {
      return error.what();
    }
    return "joined";
  });
  std::uint16_t port = 0;
  {
    const comm::TcpStoreServer gone({.run_id = kRun});
    port = gone.port();
  }
  ranks.go(std::to_string(port));
  const auto outcomes = ranks.wait(30s);
  CHECK(outcomes[0].text == "3 of 2 over shm");
  CHECK(outcomes[1].text == "3 of 2 over shm");
  // Refused, or rank 0 had already left.
  CHECK(outcomes[2].text.find("store") != std::string::npos);
}
