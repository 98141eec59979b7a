#include "comm/bootstrap.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <thread>

#include "comm/control/agreement.h"
#include "comm/control/authentication.h"
#include "comm/control/memory_store.h"
#include "comm/control/socket.h"
#include "comm/control/tcp_store.h"
#include "comm/host_staged.h"
#include "comm/shared_memory.h"
#include "comm/single.h"
#include "comm/tcp.h"
#include "core/base/context.h"
#include "core/base/device_backend.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::milliseconds kDrain{2000};
constexpr std::chrono::milliseconds kResolvePause{200};
// Maximum time from a rank's heartbeat timeout until the monitor reports the rank.
constexpr std::chrono::milliseconds kNoticed{1000};

// Rank 0 before the rendezvous, when its host and pid are unknown.
StoreHost rank_zero() { return {{0}, "rank 0"}; }

// The store that rank 0 serves. The destructor waits for the other ranks to disconnect.
struct ServedStore {
  std::unique_ptr<TcpStoreServer> server;
  std::unique_ptr<TcpStore> client;
  std::unique_ptr<Monitor> monitor;
  ~ServedStore() {
    client.reset();
    server->drain(kDrain);
  }
};

const std::string& served_address(const LaunchEnvironment& env) {
  return env.bind.empty() ? env.address : env.bind;
}

std::unique_ptr<TcpStoreServer> serve(const LaunchEnvironment& env, Deadline end) {
  const std::string& host = served_address(env);
  while (!has_address(host) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::min(kResolvePause, time_until(end)));
  }
  for (int i = 0;; ++i) {
    TcpStoreServerOptions options;
    options.host = host;
    options.port = static_cast<std::uint16_t>(env.port + i);
    options.run_id = env.run_id;
    options.token = env.token;
    options.max_connections += 4 * static_cast<std::size_t>(env.world_size);
    try {
      return std::make_unique<TcpStoreServer>(std::move(options));
    } catch (const CommError&) {
      if (i + 1 >= env.ports) throw;
    }
  }
}

std::shared_ptr<Store> serve_store(const LaunchEnvironment& env, const BootstrapOptions& options,
                                   Deadline end) {
  auto server = serve(env, end);
  auto client = std::make_unique<TcpStore>(server->host(), server->port(), server->run_id(),
                                           time_until(end), 1, server->token(), rank_zero());
  auto monitor = std::make_unique<Monitor>(
      *server, MonitorOptions{.silence = options.heartbeat_timeout, .server = rank_zero()}, nullptr,
      options.on_note);
  Store* const store = client.get();
  std::shared_ptr<ServedStore> served(
      new ServedStore{std::move(server), std::move(client), std::move(monitor)});
  return {std::move(served), store};
}

// Connects to the store of the launcher or of rank 0.
std::shared_ptr<Store> join_store(const LaunchEnvironment& env,
                                  std::chrono::milliseconds deadline) {
  try {
    return std::make_shared<TcpStore>(env.address, env.port, env.run_id, deadline, env.ports,
                                      env.token, env.rank_zero_serves ? rank_zero() : StoreHost());
  } catch (const CommError& error) {
    if (!env.rank_zero_serves || error.failure() != CommFailure::Timeout) throw;
    throw CommError(CommFailure::Timeout, {0}, "{}", error.what());
  }
}

bool computes_on_device(const BootstrapOptions& options) {
  const auto& context = options.communicator.context;
  return context && context->device().type == DeviceType::CUDA;
}

// Adds host staging if this rank computes on a device.
std::unique_ptr<Communicator> adapted(const BootstrapOptions& options,
                                      std::unique_ptr<Communicator> communicator) {
  return computes_on_device(options)
             ? make_host_staged_communicator(std::move(communicator), options.communicator.context)
             : std::move(communicator);
}

bool may_share_devices() {
  const char* value = std::getenv("TESSERA_NCCL_SHARE_DEVICES");  // NOLINT(concurrency-mt-unsafe)
  return value != nullptr && std::string_view(value) == "1";
}

// Describes the first two ranks that share a device; empty: none do.
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

// Opens NCCL if all ranks can use it; else sets why_not_nccl to the same text on every rank.
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

// Passes the error that ends the run to the communicator, even if the error came first.
struct AbortTarget {
  std::mutex mutex;
  Communicator* communicator = nullptr;
  std::optional<CommError> verdict = {};

  void fail(const CommError& error) {
    const std::lock_guard lock(mutex);
    verdict = error;
    if (communicator != nullptr) communicator->fail(error);
  }
  void set(Communicator* made) {
    const std::lock_guard lock(mutex);
    if (verdict) throw CommError(*verdict);
    communicator = made;
  }
};

std::unique_ptr<Heartbeat> start_heartbeat(const LaunchEnvironment& env,
                                           const BootstrapOptions& options, const RankGroup& group,
                                           const std::shared_ptr<AbortTarget>& target) {
  HeartbeatOptions heartbeat;
  heartbeat.silence = options.heartbeat_timeout;
  if (env.rank_zero_serves) {
    heartbeat.server = {{0}, fmt::format("rank 0 ({})", group.ranks[0].process())};
  }
  heartbeat.on_verdict = [target](const CommError& error) { target->fail(error); };
  heartbeat.on_lost = [store = group.store] { store->give_up(); };
  if (options.on_stuck) {
    heartbeat.on_stuck = [stuck = options.on_stuck, ranks = group.ranks](const CommError& error) {
      stuck(error, ranks);
    };
  }
  constexpr std::chrono::milliseconds kNoLimit{60'000};
  auto store = group.store->separate(heartbeat.silence.count() > 0 ? heartbeat.silence : kNoLimit);
  return std::make_unique<Heartbeat>(std::move(store), env.rank, group.status,
                                     std::move(heartbeat));
}

// The first rank at the store chooses the id. The run id does not identify a start, because most
// launchers reuse it.
void share_start_id(Store& store, const BootstrapOptions& options) {
  if (!options.on_start_id) return;
  std::random_device random;
  const std::uint64_t mine = (std::uint64_t{random()} << 32 | random()) | 1;
  const std::string text = set_or_get(store, "start id", std::to_string(mine));
  std::uint64_t id = 0;
  if (parse_number(text, id) && id != 0) options.on_start_id(id);
}

// Publishes `error`; returns the error that ends the run, or `error` if the store is unreachable.
CommError published(Store& store, const CommError& error) {
  try {
    return publish_verdict(store, error);
  } catch (const CommError&) {
    return error;
  }
}

// Creates the communicator after the rendezvous.
void connect(RankGroup& group, const LaunchEnvironment& env, const BootstrapOptions& options,
             Deadline end) {
  const std::string& backend = options.backend;
  const bool on_device = computes_on_device(options);
  const Hello& hello = group.ranks[static_cast<std::size_t>(env.rank)];
  const auto time_to_connect = [&] {
    return std::max(time_until(end), std::chrono::milliseconds(2000));
  };
  const auto other = std::find_if(group.ranks.begin(), group.ranks.end(),
                                  [&](const Hello& h) { return h.host != group.ranks[0].host; });
  const bool one_host = other == group.ranks.end();
  const auto fill = [&](ConnectOptions& to) {
    to.communicator = options.communicator;
    to.communicator.ends_run = true;
    to.connect_timeout = time_to_connect();
    for (const Hello& h : group.ranks) to.processes.push_back(h.process());
  };

  if (on_device && (backend == "auto" || backend == "nccl")) {
    if (auto driver = try_nccl(group, env.rank, options, time_to_connect())) {
      NcclOptions nccl;
      fill(nccl);
      group.communicator =
          make_nccl_communicator(std::move(driver), group.store, env.rank, env.world_size, nccl);
      return;
    }
    require<Unsupported>(backend == "auto", "comm.backend=nccl: {}", group.why_not_nccl);
  }

  if (backend != "tcp") {
    SharedMemoryOptions shared;
    fill(shared);
    try {
      if (!one_host) {
        throw Unsupported("the ranks are on several hosts: rank 0 on {}, rank {} on {}",
                          group.ranks[0].host, other->rank, other->host);
      }
      SharedSegment segment =
          connect_shared_segment(*group.store, env.rank, env.world_size, shared);
      group.communicator =
          adapted(options, make_shared_memory_communicator(group.store, env.rank, env.world_size,
                                                           std::move(segment), shared));
      return;
    } catch (const Unsupported& error) {
      require<Unsupported>(backend == "auto", "comm.backend=shm: {}; use tcp or auto",
                           error.what());
      group.why_not_shared_memory = error.what();
    }
  }

  TcpOptions tcp;
  fill(tcp);
  tcp.run_id = env.run_id;
  tcp.token = env.token;
  if (options.heartbeat_timeout.count() > 0)
    tcp.watched_within = options.heartbeat_timeout + kNoticed;
  if (!one_host) {
    // hello.host is the last resort, because it resolves to a loopback address on many systems.
    std::vector<std::string> others = {env.address};
    for (const Hello& h : group.ranks) {
      if (h.host != hello.host) others.push_back(h.host);
    }
    // Containers that share a network stack reach each other over loopback.
    const auto towards = address_towards(others);
    tcp.address = towards ? *towards : is_loopback(env.address) ? env.address : hello.host;
  }
  group.communicator =
      adapted(options, make_tcp_communicator(group.store, env.rank, env.world_size, tcp));
}

}  // namespace

RankGroup bootstrap(const LaunchEnvironment& env, const BootstrapOptions& options) {
  const std::string& backend = options.backend;
  require(backend == "auto" || backend == "shm" || backend == "tcp" || backend == "nccl",
          "comm.backend: expected auto, shm, tcp or nccl, got '{}'", backend);
  const auto& context = options.communicator.context;
  const bool on_device = computes_on_device(options);
  require<Unsupported>(
      backend != "nccl" || on_device,
      "comm.backend=nccl needs ranks that compute on GPUs, but this one computes on "
      "the cpu; use comm.backend=shm, tcp or auto");
  RankGroup group;
  const auto target = std::make_shared<AbortTarget>();
  const Hello hello = make_hello(env.rank, env.world_size, env.run_id, options.fingerprint,
                                 on_device ? context->backend().device_id() : std::string());
  group.status = options.status ? options.status : std::make_shared<RankStatus>(hello.process());
  if (env.world_size == 1) {
    group.store = std::make_shared<MemoryStore>();
    group.communicator = adapted(options, make_single_communicator());
    group.ranks = {hello};
    share_start_id(*group.store, options);
    return group;
  }

  const auto end = std::chrono::steady_clock::now() + options.init_timeout;
  if (env.rank_zero_serves && env.rank == 0) {
    group.store = serve_store(env, options, end);
  } else {
    // Rank 0 refuses to serve without a token: fail here too instead of timing out.
    if (env.rank_zero_serves && has_address(served_address(env))) {
      require_token(served_address(env), env.token);
    }
    group.store = join_store(env, time_until(end));
  }
  share_start_id(*group.store, options);
  group.ranks = rendezvous(*group.store, hello, time_until(end));
  if (options.on_met) options.on_met(group.ranks);

  group.heartbeat = start_heartbeat(env, options, group, target);
  try {
    connect(group, env, options, end);
  } catch (const CommError& error) {
    // Not published, because the store may be slow for this rank only.
    if (error.culprits().empty() || error.fate() == kNoAnswer) throw;
    throw published(*group.store, error);
  }
  target->set(group.communicator.get());
  group.status->set_collective(
      [communicator = group.communicator.get()] { return communicator->under_way(); });
  return group;
}

}  // namespace tessera::comm
