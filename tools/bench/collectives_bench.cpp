// Measures the latency of collectives between processes of one host, alternating shared memory and
// TCP. Prints the median and best time per call on rank 0.
//
//   tessera_collectives_bench [RANKS] [CHUNK_KIB]
//   tessera_collectives_bench ledger RANKS FILE
//
// The second form measures the overhead of recording and comparing collectives over shared memory.
// It alternates calls with a recorder (FILE.0, FILE.1, ...) and without one, and separately times
// the recorder's three calls and the comparison of signatures.
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
#include "comm/flight_recorder.h"
#include "comm/shared_memory.h"
#include "comm/tcp.h"
#include "core/base/clock.h"
#include "core/base/memory.h"

namespace tessera::comm {
namespace {

std::unique_ptr<Communicator> join(const std::string& backend, int rank, int world, int port,
                                   int round, std::size_t chunk) {
  auto store = std::make_shared<TcpStore>("127.0.0.1", static_cast<std::uint16_t>(port), "bench",
                                          std::chrono::seconds(10));
  const std::string name = fmt::format("{}-{}", backend, round);
  if (backend == "tcp") {
    TcpOptions options;
    options.name = name;
    return make_tcp_communicator(std::move(store), rank, world, options);
  }
  SharedMemoryOptions options;
  options.name = name;
  if (chunk > 0) options.chunk_bytes = chunk;
  SharedSegment segment = connect_shared_segment(*store, rank, world, options);
  return make_shared_memory_communicator(std::move(store), rank, world, std::move(segment),
                                         options);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double micros_of(int calls, const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) call();
  return seconds_since(start) * 1e6 / calls;
}

void measure(Communicator& c, const std::string& name, std::int64_t bytes,
             const std::function<void()>& call) {
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> micros;
  const int calls = bytes > (4 << 20) ? 20 : 200;
  for (int i = 0; i < calls; ++i) micros.push_back(micros_of(1, call));
  if (c.rank() != 0) return;
  fmt::print("{:<16} {:>9} {:<6} {:>10.1f} us median {:>10.1f} us best\n", name, bytes, c.backend(),
             median(micros), std::ranges::min(micros));
  std::fflush(stdout);
}

void run(Communicator& c) {
  measure(c, "barrier", 0, [&] { c.barrier({}); });
  std::vector<double> scalar(2, 1.0);
  measure(c, "all_reduce", 16,
          [&] { c.all_reduce(dense_view(scalar.data(), DType::F64, {2}), ReduceOp::Max, {}); });
  for (const std::int64_t bytes : {4 << 10, 64 << 10, 1 << 20, 16 << 20}) {
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

// Prints medians over blocks of calls, alternating blocks with and without a recorder.
void measure_recorder(Communicator& c, const std::shared_ptr<FlightRecorder>& recorder,
                      const char* name, std::int64_t bytes, const std::function<void()>& call) {
  constexpr int kBlocks = 60;
  const int calls = 20;
  std::vector<double> micros[2];
  for (int i = 0; i < 2 * kBlocks; ++i) {
    c.set_recorder(i % 2 == 1 ? recorder : nullptr);
    call();  // synchronizes the ranks at the start of a block
    micros[i % 2].push_back(micros_of(calls, call));
  }
  if (c.rank() != 0) return;
  const double off = median(micros[0]), on = median(micros[1]);
  fmt::print("{:<16} {:>9} {:>12.2f} {:>12.2f} {:>8.3f}\n", name, bytes, off, on, on / off);
  std::fflush(stdout);
}

void run_ledger(Communicator& c, const std::string& file) {
  const auto recorder = FlightRecorder::create(fmt::format("{}.{}", file, c.rank()),
                                               {.rank = c.rank(), .world_size = c.world_size()});
  if (!recorder->why_not_in_file().empty()) {
    fmt::print(stderr, "records in memory: {}\n", recorder->why_not_in_file());
  }
  if (c.rank() == 0) {
    fmt::print("{:<16} {:>9} {:>12} {:>12} {:>8}\n", "collective", "bytes", "off, us", "on, us",
               "on/off");
  }
  measure_recorder(c, recorder, "barrier", 0, [&] { c.barrier({.label = "barrier step"}); });
  for (const std::int64_t bytes : {64 << 10, 1 << 20}) {
    const std::int64_t part = bytes / 4 / c.world_size();
    std::vector<float> whole(static_cast<std::size_t>(part * c.world_size()), 1.0F);
    std::vector<float> own(static_cast<std::size_t>(part));
    const TensorView buffer = dense_view(whole.data(), DType::F32, {part * c.world_size()});
    const TensorView out = dense_view(own.data(), DType::F32, {part});
    measure_recorder(c, recorder, "all_gather", bytes,
                     [&] { c.all_gather(buffer, {.label = "all_gather h.3"}); });
    measure_recorder(c, recorder, "reduce_scatter", bytes,
                     [&] { c.reduce_scatter(buffer, out, {.label = "reduce_scatter h.3"}); });
  }
  c.set_recorder(nullptr);
  c.barrier({});
  if (c.rank() != 0) return c.barrier({});  // the others idle, so that they don't disturb
  Collective one;
  one.label = "reduce_scatter h.3";
  std::vector<double> record, compare;
  std::size_t mismatches = 0;
  for (int block = 0; block < 200; ++block) {
    record.push_back(micros_of(1000, [&] {
      ++one.sequence;
      const std::uint64_t entry = recorder->queued(one);
      recorder->started(entry);
      recorder->ended(entry, true);
    }));
    compare.push_back(micros_of(1000, [&] {  // like the backends: make own signature, compare all
      ++one.sequence;
      const Signature own(one);
      std::vector<Signature> signatures;
      for (int r = 0; r < c.world_size(); ++r) signatures.push_back(own);
      mismatches += find_mismatch(signatures).has_value();
    }));
  }
  fmt::print("record, us {:.3f}\ncompare, us {:.3f}\n", median(record), median(compare));
  if (mismatches != 0) fmt::print("found {} mismatches\n", mismatches);
  std::fflush(stdout);
  c.barrier({});
}

int bench(int world, std::size_t chunk, const std::string& ledger) {
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
    if (!ledger.empty()) {
      run_ledger(*join("shm", rank, world, port, 0, 0), ledger);
      ::_exit(0);
    }
    for (int round = 0; round < 2; ++round) {
      for (const char* backend : {"shm", "tcp"}) {
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
  const bool ledger = argc > 1 && std::string(argv[1]) == "ledger";
  if (ledger && argc != 4) {
    fmt::print(stderr, "usage: tessera_collectives_bench ledger RANKS FILE\n");
    return 2;
  }
  if (ledger) return tessera::comm::bench(std::atoi(argv[2]), 0, argv[3]);
  const int world = argc > 1 ? std::atoi(argv[1]) : 2;
  const int kib = argc > 2 ? std::atoi(argv[2]) : 0;
  return tessera::comm::bench(world, static_cast<std::size_t>(kib) * 1024, {});
}
