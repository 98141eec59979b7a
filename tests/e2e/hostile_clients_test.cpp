#include <doctest/doctest.h>
#include <fmt/format.h>

#include <thread>

#include "comm/control/socket.h"
#include "tests/comm/control/hostile_client.h"
#include "tests/e2e/small_run.h"

using namespace tessera;
using namespace tessera::test;

namespace {

// An environment variable of a process at its start.
std::string variable(pid_t process, const std::string& name) {
  std::ifstream in(fmt::format("/proc/{}/environ", process), std::ios::binary);
  for (std::string line; std::getline(in, line, '\0');) {
    if (line.starts_with(name + "=")) return line.substr(name.size() + 1);
  }
  return {};
}

}  // namespace

TEST_CASE_FIXTURE(
    InMemory,
    "hundreds of hostile clients during training: none joins, and the losses are the same") {
  int world = 0;
  for (const int n : {2, 3, 4}) {
    SUBCASE(fmt::format("{} ranks", n).c_str()) { world = n; }
  }
  if (world == 0) return;
  constexpr int kSteps = 400, kLeast = 300;
  const auto command = [&](const std::string& run) {
    return joined(small_run(text, dir.file(run), world, kSteps), {"--train.global_batch=12"});
  };
  run_to(0, command("quiet"));

  CliProcess process(joined(command("attacked"), {"--checkpoint.every=20"}));
  REQUIRE(process.wait_for("step   1/"));
  const auto ranks = process.ranks();
  REQUIRE(ranks.size() == static_cast<std::size_t>(world));
  const pid_t rank = ranks.at(1);
  const std::string address = variable(rank, "TESSERA_RENDEZVOUS");
  const std::size_t colon = address.rfind(':');
  REQUIRE(colon != std::string::npos);
  const Door door{address.substr(0, colon),
                  static_cast<std::uint16_t>(std::stoi(address.substr(colon + 1))),
                  variable(rank, "TESSERA_RUN_ID")};
  // An honest client joins and leaves, so that there is something to replay.
  const Recording said = record(door, variable(rank, "TESSERA_TOKEN"));
  CHECK_THROWS_AS(record(door, "a token that is none of this run's"), std::runtime_error);

  Attack attack;
  std::deque<comm::FileDescriptor> open;
  std::mt19937 random(5);
  // As long as training runs, but bounded, so as not to starve the machine.
  while (process.running() && attack.made.load() < 10 * kLeast) {
    attack_once(random, door, said, open, 40, attack);
    std::this_thread::sleep_for(1ms);
  }
  for (const comm::FileDescriptor& fd : open) leave(fd, attack);
  open.clear();
  end_of(process, 0);
  CHECK(attack.made.load() >= kLeast);
  CHECK(attack.refused.load() > kLeast / 10);
  CHECK(attack.joined.load() == 0);
  CHECK(read_metrics(dir.file("attacked")) == read_metrics(dir.file("quiet")));
  MESSAGE(attack.made.load() << " hostile connections, " << attack.refused.load() << " refused");
}
