// Real NCCL: one rank, and several on one GPU, which NCCL treats as separate hosts. Skips without a
// GPU, or where NCCL does not support that. Ranks are processes; the test itself never uses CUDA,
// since a process that has used CUDA can't be forked.
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "comm/control/tcp_store.h"
#include "comm/nccl.h"
#include "core/base/device_backend.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"
#include "tests/support/multiprocess.h"

using namespace tessera;
using namespace tessera::test;

namespace {

constexpr const char* kSkipped = "skipped: ";
constexpr CollectiveLimits kLimits{.sums_in_rank_order = false, .floating_max = false};

using Body = std::function<std::string(comm::Communicator&, int rank)>;

// Runs `body` on each rank of a group on cuda:0; returns its results, or the reason for skipping.
// After a skip, skips all larger groups: each attempt may take its whole deadline.
std::vector<Outcome> on_one_gpu(int world, std::chrono::milliseconds timeout, const Body& body) {
  static int skipped_world = std::numeric_limits<int>::max();
  if (world > 1 && world >= skipped_world) {
    MESSAGE(fmt::format("world size {}: skipped: so was {}", world, skipped_world));
    return {};
  }
  Processes ranks(world, [&](int rank, const std::string& port) -> std::string {
    if (world > 1) {
      ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
      ::setenv("NCCL_NET", "Socket", 1);
      ::setenv("NCCL_IB_DISABLE", "1", 1);
      ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
      ::setenv("NCCL_PROTO", "Simple", 1);
      ::setenv("NCCL_MAX_CTAS", "1", 1);
    }
    std::unique_ptr<comm::Communicator> communicator;
    try {
      device_context() =
          Context::create({.device = {DeviceType::CUDA, 0}, .plugin = cuda_plugin()});
    } catch (const Unsupported& error) {
      return kSkipped + std::string(error.what());
    }
    comm::NcclOptions options;
    options.communicator = {timeout, device_context()};
    options.connect_timeout = 20s;
    auto driver = comm::open_nccl(*device_context(), build_path("bin/libtessera_nccl.so"));
    auto store = std::make_shared<comm::TcpStore>(
        "127.0.0.1", static_cast<std::uint16_t>(std::stoi(port)), "run", 30s);
    try {
      communicator = comm::make_nccl_communicator(std::move(driver), store, rank, world, options);
    } catch (const CommError& error) {
      if (world == 1) throw;
      return kSkipped + std::string(error.what());
    }
    return body(*communicator, rank);
  });
  const comm::TcpStoreServer server({.run_id = "run"});
  ranks.go(std::to_string(server.port()));
  auto outcomes = ranks.wait(100s);
  for (const Outcome& outcome : outcomes) {
    if (outcome.text.starts_with(kSkipped)) {
      MESSAGE(fmt::format("world size {}: {}", world, outcome.text));
      skipped_world = std::min(skipped_world, world);
      return {};
    }
  }
  return outcomes;
}

std::string describe(const CommError& error) {
  return fmt::format("{} {}", fmt::join(error.culprits(), ","), error.what());
}

}  // namespace

TEST_CASE("collectives over NCCL give the expected values") {
  for (const int world : {1, 2, 4}) {
    CAPTURE(world);
    const auto outcomes = on_one_gpu(world, 60s, [](comm::Communicator& c, int) -> std::string {
      check_everything(c, kLimits);
      const auto context = device_context();
      device_context().reset();
      check_everything(c, kLimits);
      context->backend().synchronize();
      c.check();
      return "ok";
    });
    for (const Outcome& outcome : outcomes) CHECK(outcome.text == "ok");
  }
}

TEST_CASE("collectives that depend on each other on the device only run in order") {
  for (const int world : {1, 2}) {
    CAPTURE(world);
    const auto outcomes = on_one_gpu(world, 60s, [&](comm::Communicator& c, int) -> std::string {
      std::vector<float> x(100'000, 1.0F);
      Mirror<float> mirror(x);
      for (int i = 0; i < 10; ++i) {
        c.all_reduce(mirror.view(), comm::ReduceOp::Sum, {.label = "sum"});
        c.broadcast(mirror.view(), world - 1, {.label = "cast"});
      }
      mirror.fetch();
      const float wanted = world == 1 ? 1.0F : 1024.0F;
      return x.front() == wanted && x.back() == wanted ? "ok" : "other values";
    });
    for (const Outcome& outcome : outcomes) CHECK(outcome.text == "ok");
  }
}

TEST_CASE("a rank that does not call a collective over NCCL is named by both ranks") {
  const auto outcomes = on_one_gpu(2, 3s, [](comm::Communicator& c, int rank) -> std::string {
    std::vector<float> x(1000, 1.0F);
    const Mirror<float> mirror(x);
    c.barrier({.label = "start", .deadline = 60s});
    try {
      if (rank == 0) c.all_gather(mirror.view(), {.label = "h.1"});
      for (int i = 0; i < 1000; ++i) {
        c.check();
        std::this_thread::sleep_for(20ms);
      }
    } catch (const CommError& error) {
      return describe(error);
    }
    return "no error";
  });
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.in_time);
    CHECK(outcome.time < 40s);
    CHECK(outcome.text.find("1 all_gather#1 (h.1): 1 of 2 ranks arrived") == 0);
  }
}

TEST_CASE("a killed rank is named by the other at the deadline") {
  const auto outcomes = on_one_gpu(2, 3s, [](comm::Communicator& c, int rank) -> std::string {
    std::vector<float> x(1000, 1.0F);
    const Mirror<float> mirror(x);
    c.barrier({.label = "start", .deadline = 60s});
    if (rank == 1) ::raise(SIGKILL);
    try {
      c.all_gather(mirror.view(), {.label = "h.1"});
      device_context()->backend().synchronize();
      for (int i = 0; i < 1000; ++i) {
        c.check();
        std::this_thread::sleep_for(20ms);
      }
    } catch (const CommError& error) {
      return describe(error);
    }
    return "no error";
  });
  if (outcomes.empty()) return;
  CHECK(outcomes[0].in_time);
  CHECK(outcomes[0].text.find("1 all_gather#1 (h.1)") == 0);
}

TEST_CASE("the plugin refuses devices other than CUDA") {
  Processes child(1, [](int, const std::string&) -> std::string {
    try {
      comm::open_nccl(*fiber_context(), build_path("bin/libtessera_nccl.so"));
    } catch (const Unsupported& error) {
      return error.what();
    }
    return "opened";
  });
  child.go("go");
  const auto outcomes = child.wait(30s);
  CHECK(outcomes[0].text.find("NCCL can't use cuda:0: ") == 0);
}
