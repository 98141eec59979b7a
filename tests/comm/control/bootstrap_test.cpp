#include "comm/bootstrap.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include "comm/control/socket.h"
#include "comm/control/tcp_store.h"
#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"
#include "tests/support/multiprocess.h"

using namespace tessera;
using namespace tessera::test;
using comm::LaunchEnvironment;

namespace {

LaunchEnvironment environment(int rank, int world, int port, bool rank_zero_serves) {
  LaunchEnvironment e;
  e.rank = e.local_rank = rank;
  e.world_size = e.local_world_size = world;
  e.address = world > 1 ? "127.0.0.1" : "";
  e.port = static_cast<std::uint16_t>(port);
  e.ports = rank_zero_serves ? 16 : 1;
  e.run_id = "run";
  e.rank_zero_serves = rank_zero_serves;
  return e;
}

std::string sum_of_ranks(comm::RankGroup group) {
  std::vector<double> x(1, group.communicator->rank() + 1);
  group.communicator->all_reduce(view_of(x), comm::ReduceOp::Sum, {});
  comm::exchange(*group.store, "end", group.communicator->rank(), group.communicator->world_size(),
                 "bye", 5s);
  return fmt::format("{} of {} over {}", x[0], group.ranks.size(), group.communicator->backend());
}

}  // namespace

TEST_CASE("one rank needs no network") {
  const auto group = comm::bootstrap(environment(0, 1, 0, true), {});
  CHECK(group.communicator->backend() == "single");
  CHECK(group.communicator->world_size() == 1);
  CHECK(group.ranks.size() == 1);
  group.store->set("a", "b");
}

TEST_CASE("backends that are not there are refused in one sentence") {
  CHECK_THROWS_HOLDING(Unsupported, "comm.backend=nccl is not in this build",
                       comm::bootstrap(environment(0, 1, 0, true), {.backend = "nccl"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "expected auto, shm, gloo or nccl, got 'mpi'",
                       comm::bootstrap(environment(0, 1, 0, true), {.backend = "mpi"}));
}

TEST_CASE("processes come together when the launcher serves the store, and when rank 0 does") {
  for (const bool rank_zero_serves : {false, true}) {
    CAPTURE(rank_zero_serves);
    Processes ranks(3, [&](int rank, const std::string& port) {
      return sum_of_ranks(
          comm::bootstrap(environment(rank, 3, std::stoi(port), rank_zero_serves), {}));
    });
    comm::TcpStoreServer server({.run_id = "run"});
    // Rank 0 finds this port taken, by a store of another run in effect, and takes the next.
    const comm::TcpStoreServer other({.run_id = "another run"});
    ranks.go(std::to_string(rank_zero_serves ? other.port() : server.port()));
    for (const Outcome& outcome : ranks.wait(15s)) {
      CHECK(outcome.text == "6 of 3 over shm");
    }
  }
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

TEST_CASE("rank 0 waits for the address under which it is to serve, then names it") {
  LaunchEnvironment e = environment(0, 2, 900, true);
  e.address = std::string(70, 'x');
  const Stopwatch watch;
  CHECK_THROWS_HOLDING(CommError, "host '" + e.address + "' has no address",
                       comm::bootstrap(e, {.init_timeout = 300ms}));
  CHECK(watch.elapsed() >= 300ms);
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
  const comm::TcpStoreServer server({.run_id = "run"});
  const Stopwatch watch;
  ranks.go(std::to_string(server.port()));
  const auto outcomes = ranks.wait(8s);
  CHECK(watch.elapsed() < 4s);
  CHECK(outcomes[0].text == outcomes[2].text);
  CHECK(outcomes[0].text.find("rendezvous: 2 of 3 ranks arrived within") == 0);
  CHECK(outcomes[0].text.find("missing: rank 1") != std::string::npos);
}

TEST_CASE("ranks with another configuration do not start") {
  Processes ranks(2, [&](int rank, const std::string& port) -> std::string {
    try {
      comm::bootstrap(environment(rank, 2, std::stoi(port), false),
                      {.init_timeout = 5s, .fingerprint = rank == 0 ? "lr = 1" : "lr = 2"});
    } catch (const CommError& error) {
      return error.what();
    }
    return "no error";
  });
  const comm::TcpStoreServer server({.run_id = "run"});
  ranks.go(std::to_string(server.port()));
  for (const Outcome& outcome : ranks.wait(8s)) {
    CHECK(outcome.text.find("has 'lr = 2'") != std::string::npos);
  }
}
