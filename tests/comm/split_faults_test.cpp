// Subgroups of ranks that are processes: the effect on all others when one is killed or stopped
// during a collective of its group.
#include <fmt/ranges.h>

#include "comm/control/tcp_store.h"
#include "tests/comm/meshes.h"
#include "tests/support/multiprocess.h"

using namespace tessera;
using namespace tessera::test;

namespace {

constexpr const char* kBackends[] = {"tcp", "shm"};
constexpr Mesh kMesh{2, 2};

// Joins a mesh and works in rows alone, so that no rank of another row is waited for.
std::string work_in_rows(const std::string& backend, int rank, const std::string& port,
                         std::chrono::milliseconds timeout, std::size_t count) {
  const auto connect = [&] {
    return std::make_shared<comm::TcpStore>(
        "127.0.0.1", static_cast<std::uint16_t>(std::stoi(port)), "run", 10s);
  };
  std::vector<std::string> processes;
  for (int r = 0; r < kMesh.size(); ++r) processes.push_back(fmt::format("here, pid of {}", r));
  const MeshRank m(
      join_over(backend, connect(), rank, kMesh.size(), {.timeout = timeout}, std::move(processes)),
      kMesh);
  connect()->set(fmt::format("joined/{}", rank), "");
  std::vector<float> whole(count * 2), part(count);
  try {
    for (;;) {
      m.shard->all_gather(view_of(whole), {.label = "h.1"});
      m.shard->reduce_scatter(view_of(whole), view_of(part), {.label = "h.1"});
    }
  } catch (const CommError& error) {
    std::string text = fmt::format("{} [{}] {}", static_cast<int>(error.failure()),
                                   fmt::join(error.culprits(), ","), error.what());
    for (comm::Communicator* c : m.all()) {
      try {
        c->barrier({});
        text += ", but another communicator is alive";
      } catch (const CommError& later) {
        if (later.culprits() != error.culprits()) text += ", but others are blamed elsewhere";
      }
    }
    return text;
  }
}

void fault_is_named(int number, const std::string& expected, std::chrono::milliseconds timeout) {
  for (const std::string backend : kBackends) {
    for (const std::size_t count : {std::size_t{10}, std::size_t{300'000}}) {
      CAPTURE(backend);
      CAPTURE(count);
      Processes ranks(kMesh.size(), [&](int rank, const std::string& port) {
        return work_in_rows(backend, rank, port, timeout, count);
      });
      const comm::TcpStoreServer server({.run_id = "run"});
      ranks.go(std::to_string(server.port()));
      {
        comm::TcpStore waits("127.0.0.1", server.port(), "run", 10s);
        for (int r = 0; r < kMesh.size(); ++r) waits.get(fmt::format("joined/{}", r), 30s);
      }
      std::this_thread::sleep_for(200ms);
      const Stopwatch since;
      ranks.signal(3, number);
      const auto outcomes = ranks.wait(kSlack * 10s, 3);
      CHECK(since.elapsed() < kSlack * (3s + timeout / 4));
      for (const std::size_t r : {0U, 1U, 2U}) {
        CAPTURE(r);
        CAPTURE(outcomes[r].text);
        CHECK(outcomes[r].in_time);
        CHECK(outcomes[r].text.starts_with(expected));
        CHECK(outcomes[r].text.find("(h.1, shard group of ranks 2, 3): ") != std::string::npos);
        CHECK(outcomes[r].text.find("rank 3 (here, pid of 3)") != std::string::npos);
        CHECK(outcomes[r].text.find(", but another") == std::string::npos);
        CHECK(outcomes[r].text.find(", but others") == std::string::npos);
      }
    }
  }
}

}  // namespace

TEST_CASE("a killed rank of a subgroup is named by all ranks, also those of the other group") {
  fault_is_named(SIGKILL, "1 [3] ", 20s);
}

TEST_CASE("a stopped rank of a subgroup is named by all ranks at the deadline") {
  fault_is_named(SIGSTOP, "0 [3] ", 1500ms);
}
