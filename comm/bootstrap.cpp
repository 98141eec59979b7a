#include "comm/bootstrap.h"

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "comm/control/memory_store.h"
#include "comm/control/socket.h"
#include "comm/control/tcp_store.h"
#include "comm/gloo.h"
#include "comm/host_staged.h"
#include "comm/shared_memory.h"
#include "comm/single.h"
#include "core/base/context.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::milliseconds kDrain{2000};
constexpr std::chrono::milliseconds kResolvePause{200};

// The store of a run whose rank 0 serves it: this rank must leave last.
class ServedStore final : public Store {
 public:
  ServedStore(std::unique_ptr<TcpStoreServer> server, std::chrono::milliseconds deadline,
              const std::string& run_id)
      : server_(std::move(server)),
        client_(std::make_unique<TcpStore>(server_->host(), server_->port(), run_id, deadline)) {}
  ~ServedStore() override {
    client_.reset();
    server_->drain(kDrain);
  }
  void set(const std::string& key, std::string_view value) override { client_->set(key, value); }
  std::string get(const std::string& key, std::chrono::milliseconds deadline) override {
    return client_->get(key, deadline);
  }
  bool has(const std::string& key) override { return client_->has(key); }
  void leave(const std::string& name, int readers) override { client_->leave(name, readers); }

 private:
  std::unique_ptr<TcpStoreServer> server_;
  std::unique_ptr<TcpStore> client_;
};

std::unique_ptr<TcpStoreServer> serve(const LaunchEnvironment& env, Deadline end) {
  while (!has_address(env.address) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(
        std::min(kResolvePause, std::chrono::milliseconds(milliseconds_until(end))));
  }
  for (int i = 0;; ++i) {
    TcpStoreServerOptions options;
    options.host = env.address;
    options.port = static_cast<std::uint16_t>(env.port + i);
    options.run_id = env.run_id;
    options.max_connections += 4 * static_cast<std::size_t>(env.world_size);
    try {
      return std::make_unique<TcpStoreServer>(std::move(options));
    } catch (const CommError&) {
      if (i + 1 >= env.ports) throw;
    }
  }
}

bool computes_on_device(const BootstrapOptions& options) {
  const auto& context = options.communicator.context;
  return context && context->device().type == DeviceType::CUDA;
}

bool may_share_devices() {
  const char* value = std::getenv("TESSERA_NCCL_SHARE_DEVICES");  // NOLINT(concurrency-mt-unsafe)
  return value != nullptr && std::string_view(value) == "1";
}

// The first two ranks that compute on one device, in words; empty if each has its own.
std::string shared_device(const std::vector<Hello>& ranks) {
  for (const Hello& a : ranks) {
    for (const Hello& b : ranks) {
      if (b.rank <= a.rank || a.host != b.host || a.device != b.device) continue;
      return fmt::format(
          "rank {} ({}) and rank {} (pid {}) compute on the same device, {}; nccl needs one for "
          "each rank",
          a.rank, a.process(), b.rank, b.pid, a.device);
    }
  }
  return {};
}

// Opens NCCL if it can serve all ranks; else says why not, on every rank the same.
std::unique_ptr<NcclDriver> try_nccl(RankGroup& group, int rank, const BootstrapOptions& options,
                                     std::chrono::milliseconds deadline) {
  const auto on_cpu = std::find_if(group.ranks.begin(), group.ranks.end(),
                                   [](const Hello& h) { return h.device.empty(); });
  if (on_cpu != group.ranks.end()) {
    group.why_not_nccl = fmt::format("rank {} computes on the cpu", on_cpu->rank);
    return nullptr;
  }
  std::unique_ptr<NcclDriver> driver;
  std::string problem = may_share_devices() ? std::string() : shared_device(group.ranks);
  const bool is_shared = !problem.empty();
  if (!is_shared) {
    try {
      driver = options.open_nccl(*options.communicator.context);
    } catch (const Unsupported& error) {
      problem = error.what();
    }
  }
  const auto problems = exchange(*group.store, "nccl problems", rank,
                                 static_cast<int>(group.ranks.size()), problem, deadline);
  const auto first = std::find_if(problems.begin(), problems.end(),
                                  [](const std::string& text) { return !text.empty(); });
  if (first == problems.end()) return driver;
  group.why_not_nccl =
      is_shared ? problem : fmt::format("rank {}: {}", first - problems.begin(), *first);
  return nullptr;
}

}  // namespace

RankGroup bootstrap(const LaunchEnvironment& env, const BootstrapOptions& options) {
  const std::string& backend = options.backend;
  require(backend == "auto" || backend == "shm" || backend == "gloo" || backend == "nccl",
          "comm.backend: expected auto, shm, gloo or nccl, got '{}'", backend);
  const auto& context = options.communicator.context;
  const bool on_device = computes_on_device(options);
  require<Unsupported>(backend != "nccl" || on_device,
                       "comm.backend=nccl is for ranks that compute on GPUs, and these compute on "
                       "the cpu; use comm.backend=shm, gloo or auto");
  // What a communicator of host memory is to this rank.
  const auto adapted = [&](std::unique_ptr<Communicator> communicator) {
    return on_device ? make_host_staged_communicator(std::move(communicator), context)
                     : std::move(communicator);
  };

  RankGroup group;
  const Hello hello = make_hello(env.rank, env.world_size, env.run_id, options.fingerprint,
                                 on_device ? context->backend().device_id() : std::string());
  if (env.world_size == 1) {
    group.store = std::make_shared<MemoryStore>();
    group.communicator = adapted(make_single_communicator());
    group.ranks = {hello};
    return group;
  }

  const auto end = std::chrono::steady_clock::now() + options.init_timeout;
  const auto left = [&] { return std::chrono::milliseconds(milliseconds_until(end)); };
  if (env.rank_zero_serves && env.rank == 0) {
    group.store = std::make_shared<ServedStore>(serve(env, end), left(), env.run_id);
  } else {
    group.store = std::make_shared<TcpStore>(env.address, env.port, env.run_id, left(), env.ports);
  }
  group.ranks = rendezvous(*group.store, hello, left());

  const auto time_to_connect = [&] { return std::max(left(), std::chrono::milliseconds(1000)); };
  const auto other = std::find_if(group.ranks.begin(), group.ranks.end(),
                                  [&](const Hello& h) { return h.host != group.ranks[0].host; });
  const bool one_host = other == group.ranks.end();
  std::vector<std::string> processes;
  for (const Hello& h : group.ranks) processes.push_back(h.process());

  if (on_device && (backend == "auto" || backend == "nccl")) {
    if (auto driver = try_nccl(group, env.rank, options, time_to_connect())) {
      NcclOptions nccl;
      nccl.communicator = options.communicator;
      nccl.connect_timeout = time_to_connect();
      nccl.processes = processes;
      group.communicator =
          make_nccl_communicator(std::move(driver), group.store, env.rank, env.world_size, nccl);
      return group;
    }
    require<Unsupported>(backend == "auto", "comm.backend=nccl: {}", group.why_not_nccl);
  }

  if (backend != "gloo") {
    SharedMemoryOptions shared;
    shared.communicator = options.communicator;
    shared.connect_timeout = time_to_connect();
    shared.processes = processes;
    try {
      if (!one_host) {
        throw Unsupported("the ranks are on several hosts: rank 0 on {}, rank {} on {}",
                          group.ranks[0].host, other->rank, other->host);
      }
      SharedSegment segment =
          connect_shared_segment(*group.store, env.rank, env.world_size, shared);
      group.communicator = adapted(make_shared_memory_communicator(
          group.store, env.rank, env.world_size, std::move(segment), shared));
      return group;
    } catch (const Unsupported& error) {
      require<Unsupported>(backend == "auto", "comm.backend=shm: {}; use gloo or auto",
                           error.what());
      group.why_not_shared_memory = error.what();
    }
  }

  GlooOptions gloo;
  gloo.communicator = options.communicator;
  gloo.connect_timeout = time_to_connect();
  gloo.processes = std::move(processes);
  if (!one_host) {
    // Not this host's own name, which many systems resolve to a loopback address.
    std::vector<std::string> others = {env.address};
    for (const Hello& h : group.ranks) {
      if (h.host != hello.host) others.push_back(h.host);
    }
    gloo.address = address_towards(others).value_or(hello.host);
  }
  group.communicator = adapted(make_gloo_communicator(group.store, env.rank, env.world_size, gloo));
  return group;
}

}  // namespace tessera::comm
