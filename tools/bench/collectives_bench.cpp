// Latency of the collectives between processes of this host: over shared memory and over Gloo's
// TCP, taking turns. Prints rank 0's median and best time of a call.
//
//   tessera_collectives_bench [ranks] [KiB handed over at a time]
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "comm/control/tcp_store.h"
#include "comm/gloo.h"
#include "comm/shared_memory.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

std::unique_ptr<Communicator> join(const std::string& backend, int rank, int world, int port,
                                   int round, std::size_t chunk) {
  auto store = std::make_shared<TcpStore>("127.0.0.1", static_cast<std::uint16_t>(port), "bench",
                                          std::chrono::seconds(10));
  const std::string name = fmt::format("{}-{}", backend, round);
  if (backend == "gloo") {
    GlooOptions options;
    options.name = name;
    return make_gloo_communicator(std::move(store), rank, world, options);
  }
  SharedMemoryOptions options;
  options.name = name;
  if (chunk > 0) options.chunk_bytes = chunk;
  SharedSegment segment = connect_shared_segment(*store, rank, world, options);
  return make_shared_memory_communicator(std::move(store), rank, world, std::move(segment),
                                         options);
}

void measure(Communicator& c, const std::string& name, std::int64_t bytes,
             const std::function<void()>& call) {
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> micros;
  const int calls = bytes > (4 << 20) ? 20 : 200;
  for (int i = 0; i < calls; ++i) {
    const auto start = Clock::now();
    call();
    micros.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  if (c.rank() != 0) return;
  std::sort(micros.begin(), micros.end());
  fmt::print("{:<16} {:>9} {:<6} {:>10.1f} us median {:>10.1f} us best\n", name, bytes, c.backend(),
             micros[micros.size() / 2], micros.front());
  std::fflush(stdout);
}

void run(Communicator& c) {
  measure(c, "barrier", 0, [&] { c.barrier({}); });
  std::vector<double> scalar(2, 1.0);
  measure(c, "all_reduce", 16,
          [&] { c.all_reduce(dense_view(scalar.data(), DType::F64, {2}), ReduceOp::Max, {}); });
  for (const std::int64_t bytes : {64 << 10, 1 << 20, 32 << 20}) {
    const std::int64_t part = bytes / 4 / c.world_size();
    const std::int64_t count = part * c.world_size();
    std::vector<float> whole(static_cast<std::size_t>(count), 1.0F);
    std::vector<float> own(static_cast<std::size_t>(part));
    const TensorView buffer = dense_view(whole.data(), DType::F32, {count});
    const TensorView out = dense_view(own.data(), DType::F32, {part});
    measure(c, "all_gather", bytes, [&] { c.all_gather(buffer, {}); });
    measure(c, "reduce_scatter", bytes, [&] { c.reduce_scatter(buffer, out, {}); });
    measure(c, "all_reduce", bytes, [&] { c.all_reduce(buffer, ReduceOp::Max, {}); });
  }
}

int bench(int world, std::size_t chunk) {
  std::vector<pid_t> children;
  int port_pipe[2];
  if (::pipe(port_pipe) != 0) return 1;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t pid = ::fork();
    if (pid != 0) {
      children.push_back(pid);
      continue;
    }
    int port = 0;
    if (::read(port_pipe[0], &port, sizeof(port)) != sizeof(port)) ::_exit(1);
    for (int round = 0; round < 2; ++round) {
      for (const char* backend : {"shm", "gloo"}) {
        run(*join(backend, rank, world, port, round, chunk));
      }
    }
    ::_exit(0);
  }
  const TcpStoreServer server({.run_id = "bench"});
  const int port = server.port();
  for (int rank = 0; rank < world; ++rank) {
    if (::write(port_pipe[1], &port, sizeof(port)) != sizeof(port)) return 1;
  }
  int failed = 0;
  for (const pid_t pid : children) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    failed += status != 0;
  }
  return failed;
}

}  // namespace
}  // namespace tessera::comm

int main(int argc, char** argv) {
  const int world = argc > 1 ? std::atoi(argv[1]) : 2;
  const int kib = argc > 2 ? std::atoi(argv[2]) : 0;
  return tessera::comm::bench(world, static_cast<std::size_t>(kib) * 1024);
}
