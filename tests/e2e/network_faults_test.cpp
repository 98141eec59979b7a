// Ranks on separate hosts whose network is cut, lossy or slow. A cut drops packets without closing
// connections, so only silence reveals it.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <thread>

#include "tests/e2e/small_run.h"
#include "tests/support/multiprocess.h"
#include "tests/support/virtual_network.h"

using namespace tessera;
using namespace tessera::test;
using namespace std::chrono_literals;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int kComm = 4;
// From the cut to the last exit: 4 s heartbeat timeout, a heartbeat interval before it, 2.5 s for a
// rank to leave, and slack for a busy machine. Without heartbeats it would take minutes.
constexpr milliseconds kAllGone = 25s * kSlack;
constexpr milliseconds kWholeRun = 100s * kSlack;

std::unique_ptr<VirtualNetwork> make_network(int hosts) {
  try {
    return std::make_unique<VirtualNetwork>(hosts);
  } catch (const NoVirtualNetwork& error) {
    MESSAGE("skipped: no virtual network here: " << error.what()
                                                 << "; run it as root, with /dev/net/tun");
    return nullptr;
  }
}

class Run {
 public:
  Run(VirtualNetwork& network, int world, Arguments arguments)
      : network_(network), world_(world), arguments_(std::move(arguments)) {
    for (int rank = 0; rank < world; ++rank) start(rank);
  }

  CliProcess& rank(int rank) { return *ranks_.at(static_cast<std::size_t>(rank)); }

  // Waits for all ranks to exit by themselves until `end`.
  std::vector<CliResult> wait(Clock::time_point end) {
    std::vector<CliResult> results;
    for (auto& process : ranks_) {
      const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
      results.push_back(process->wait(std::max(left, milliseconds(0))));
    }
    return results;
  }

 private:
  void start(int rank) {
    network_.on(rank, [&] {
      ranks_.push_back(std::make_unique<CliProcess>(
          joined(arguments_,
                 {"--rank", std::to_string(rank), "--world-size", std::to_string(world_), "--rdzv",
                  VirtualNetwork::address(0) + ":23456",
                  "--comm.bind=" + VirtualNetwork::address(0), "--comm.backend=gloo"}),
          Variables{{"TESSERA_TOKEN", "the secret of these ranks"}}));
    });
  }

  VirtualNetwork& network_;
  const int world_;
  const Arguments arguments_;
  std::vector<std::unique_ptr<CliProcess>> ranks_;
};

std::string all_of(const std::vector<CliResult>& results) {
  std::string text;
  for (std::size_t rank = 0; rank < results.size(); ++rank)
    text += fmt::format("rank {}: {}\n", rank, results[rank].describe());
  return text;
}

// The rank's error line, or empty.
std::string fault_line(const CliResult& result) {
  const auto at = result.err.rfind("tessera: error: E04");
  return at == std::string::npos ? "" : result.err.substr(at, result.err.find('\n', at) - at);
}

// After `victim` is cut off, each other rank must name it alone, and it must name others.
void check_ends(const std::vector<CliResult>& results, int victim) {
  INFO(all_of(results));
  for (int rank = 0; rank < static_cast<int>(results.size()); ++rank) {
    CAPTURE(rank);
    const CliResult& result = results[static_cast<std::size_t>(rank)];
    CHECK(result.in_time);
    CHECK(result.code == kComm);
    const std::string line = fault_line(result);
    const std::string culprits = line.substr(std::min(line.size(), line.find(" culprit=")),
                                             line.find(" action=") - line.find(" culprit="));
    CAPTURE(culprits);
    const std::string named = fmt::format("rank {} (host{}, pid ", victim, victim);
    if (rank == victim) {
      CHECK(holds(culprits, "culprit=rank "));
      CHECK_FALSE(holds(culprits, named));
    } else {
      CHECK(holds(culprits, "culprit=" + named));
      CHECK_FALSE(holds(culprits, ", rank "));
    }
    CHECK_FALSE(holds(result.err, "bug"));
  }
}

}  // namespace

TEST_CASE_FIXTURE(InMemory, "a rank whose network is cut is named by all others, and all end") {
  struct Fault {
    int world, victim;
    std::string every;  // steps between saves; 1: mostly within saves
    std::string heartbeat_timeout = "4";
  };
  // In the last case, a rendezvous that waits for the store fails before the heartbeats do.
  for (const Fault& fault :
       {Fault{3, 1, "20"}, Fault{3, 2, "1"}, Fault{3, 0, "1"}, Fault{4, 2, "1"}, Fault{2, 1, "1"},
        Fault{2, 0, "20"}, Fault{2, 0, "1", "8"}}) {
    CAPTURE(fault.world);
    CAPTURE(fault.victim);
    CAPTURE(fault.every);
    auto network = make_network(fault.world);
    if (!network) return;
    const std::string out = dir.file(fmt::format("run-{}-{}-{}-{}", fault.world, fault.victim,
                                                 fault.every, fault.heartbeat_timeout));
    Run run(*network, fault.world,
            joined(small_run(text, out, 1, 100'000),
                   {"--train.global_batch=12", "--checkpoint.every=" + fault.every,
                    "--comm.heartbeat_timeout=" + fault.heartbeat_timeout}));
    REQUIRE(run.rank(0).wait_for("saved"));
    network->cut(fault.victim);
    const auto cut_at = Clock::now();
    check_ends(run.wait(cut_at + kAllGone), fault.victim);
    MESSAGE(fmt::format("world {}, rank {} cut off: all exited after {:.1f} s", fault.world,
                        fault.victim,
                        std::chrono::duration<double>(Clock::now() - cut_at).count()));
    run_to(0, {"checkpoint", "verify", out});
  }
}

namespace {

// Ranks 1 and 2 don't reach each other: all ranks blame the same one of them, or both.
void check_apart(const std::vector<CliResult>& results, const std::string& why) {
  INFO(all_of(results));
  for (const CliResult& result : results) {
    CHECK(result.in_time);
    CHECK(result.code == kComm);
    const std::string line = fault_line(result);
    CAPTURE(line);
    CHECK(line.starts_with("tessera: error: E043 "));
    const std::string culprit = line.substr(line.find(" culprit="));
    CHECK(culprit == fault_line(results[0]).substr(fault_line(results[0]).find(" culprit=")));
    CHECK((culprit.starts_with(" culprit=rank 1 (host1, pid ") ||
           culprit.starts_with(" culprit=rank 2 (host2, pid ")));
    CHECK_FALSE(holds(culprit.substr(0, culprit.find(" action=")), "rank 0"));
    CHECK(holds(line, why));
  }
}

}  // namespace

TEST_CASE_FIXTURE(InMemory, "if two ranks lose their connection, all ranks name the same one") {
  auto network = make_network(3);
  if (!network) return;
  const std::string out = dir.file("run");
  Run run(*network, 3,
          joined(small_run(text, out, 1, 100'000),
                 {"--train.global_batch=6", "--checkpoint.every=20", "--comm.timeout=6"}));
  REQUIRE(run.rank(0).wait_for("saved"));
  network->cut_between(1, 2);
  check_apart(run.wait(Clock::now() + kAllGone), " within 6 s");
  run_to(0, {"checkpoint", "verify", out});
}

TEST_CASE_FIXTURE(InMemory, "if two ranks can't connect, all ranks name the same one") {
  auto network = make_network(3);
  if (!network) return;
  network->cut_between(1, 2);
  const auto started = Clock::now();
  Run run(*network, 3,
          joined(small_run(text, dir.file("run"), 1, 10),
                 {"--train.global_batch=6", "--comm.init_timeout=8"}));
  check_apart(run.wait(started + 8s + 20s * kSlack), "could not connect to rank ");
}

TEST_CASE_FIXTURE(InMemory,
                  "an unreachable rank is reported at the start by all ranks, including itself") {
  for (const int victim : {1, 0}) {
    CAPTURE(victim);
    auto network = make_network(3);
    if (!network) return;
    network->cut(victim);
    const auto started = Clock::now();
    Run run(*network, 3,
            joined(small_run(text, dir.file("run"), 1, 10),
                   {"--train.global_batch=6", "--comm.init_timeout=8"}));
    const auto results = run.wait(started + 8s + 20s * kSlack);
    INFO(all_of(results));
    for (int rank = 0; rank < 3; ++rank) {
      CAPTURE(rank);
      const CliResult& result = results[static_cast<std::size_t>(rank)];
      CHECK(result.in_time);
      CHECK(result.code == kComm);
      CHECK(holds(fault_line(result), "E041"));
      if (victim == 0 && rank == 0) {
        CHECK(holds(result.err, "missing: ranks 1, 2"));
      } else if (victim == 0 || rank == victim) {
        CHECK(holds(result.err, "no store answered at 10.77.0.1:23456"));
        CHECK(holds(fault_line(result), " culprit=rank 0 action="));
      } else {
        CHECK(holds(result.err, "missing: rank 1"));
      }
    }
    CHECK_FALSE(std::filesystem::exists(dir.file("run")));
  }
}

TEST_CASE_FIXTURE(InMemory, "a temporary network disturbance changes nothing") {
  constexpr int kSteps = 60;  // more than complete during the disturbance
  const auto arguments = [&](const std::string& out, int heartbeat_timeout = 4) {
    return joined(small_run(text, out, 1, kSteps),
                  {"--train.global_batch=6", "--checkpoint.every=20",
                   fmt::format("--comm.heartbeat_timeout={}", heartbeat_timeout)});
  };
  const std::string undisturbed = dir.file("undisturbed");
  {
    auto network = make_network(3);
    if (!network) return;
    Run run(*network, 3, arguments(undisturbed));
    const auto results = run.wait(Clock::now() + kWholeRun);
    INFO(all_of(results));
    for (const CliResult& result : results) REQUIRE(result.code == 0);
  }
  struct Fault {
    std::string name;
    int host;
    VirtualNetwork::Link link;
    milliseconds time;
    int heartbeat_timeout = 4;
  };
  // TCP doubles its retransmission timeout after each loss, so a few losses in a row cause seconds
  // of silence, even after the disturbance.
  for (const Fault& fault :
       {Fault{"lossy", 1, {.loss = 0.3}, 3s, 20}, Fault{"lossy-0", 0, {.loss = 0.3}, 3s, 20},
        Fault{"slow", 2, {.delay = 200ms}, 3s}, Fault{"gone", 1, {.loss = 1}, 1500ms}}) {
    CAPTURE(fault.name);
    auto network = make_network(3);
    if (!network) return;
    const std::string out = dir.file(fault.name);
    Run run(*network, 3, arguments(out, fault.heartbeat_timeout));
    REQUIRE(run.rank(0).wait_for("step  1/"));
    network->set_link(fault.host, fault.link);
    std::this_thread::sleep_for(fault.time);
    const bool went_on = run.rank(0).running();  // otherwise the disturbance was not tested
    network->heal(fault.host);
    const auto results = run.wait(Clock::now() + kWholeRun);
    INFO(all_of(results));
    CHECK(went_on);
    for (const CliResult& result : results) REQUIRE(result.code == 0);
    CHECK(read_metrics(out) == read_metrics(undisturbed));
  }
}
