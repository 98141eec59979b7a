#include "train/ranks.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>

#include "comm/control/agreement.h"
#include "comm/control/authentication.h"
#include "comm/control/memory_store.h"
#include "comm/host_staged.h"
#include "comm/single.h"
#include "comm/threads.h"
#include "core/base/choose_device.h"
#include "core/base/error.h"
#include "core/base/processors.h"
#include "train/fault_line.h"

namespace tessera::train {

std::vector<std::string> Rank::exchange(const std::string& mine) {
  if (context->device().type == DeviceType::Meta)  // a plan has no other ranks
    return {static_cast<std::size_t>(world_size()), mine};
  return comm::exchange(*store, unique_name("exchange"), rank(), world_size(), mine, timeout);
}

std::string Rank::unique_name(const std::string& prefix) {
  return fmt::format("{}/{}", prefix, names++);
}

namespace {

// Letters, digits, '.', '_' and '-' of a launcher's id; other characters become '_'.
std::string run_id_of(const comm::LaunchEnvironment& environment) {
  std::string id = environment.run_id.empty() ? "run" : environment.run_id.substr(0, 64);
  for (char& c : id)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '-') c = '_';
  return id;
}

// Makes the other ranks end, and name this one.
void publish(const Rank& rank, int number, const std::string& process,
             const std::exception& error) noexcept {
  if (tell_others(*rank.store, number, process, error)) return;
  const auto* const lost = dynamic_cast<const CommError*>(&error);
  if (lost == nullptr) return;
  try {
    comm::publish_verdict(*rank.store, *lost);
  } catch (const std::exception&) {
    // Ignored: the first error is reported.
  }
}

void exit_stuck(const CommError& error) {
  fmt::print(stderr, "the run has failed, and this rank does not end: {}\n", error.what());
  std::_Exit(4);
}

}  // namespace

Rank join(const RankOptions& options) {
  const comm::Variables variables = comm::process_environment();
  comm::LaunchEnvironment environment = comm::detect_launch(variables);
  environment.token = comm::read_token(variables);
  // Keep the token from child processes.
  ::unsetenv("TESSERA_TOKEN");     // NOLINT(concurrency-mt-unsafe)
  ::unsetenv("TESSERA_TOKEN_FD");  // NOLINT(concurrency-mt-unsafe)
  const int threads = default_threads(options.threads, environment.local_world_size);
  Rank rank;
  rank.timeout = options.timeout;
  rank.run_id = run_id_of(environment);
  rank.context =
      open_device(options.device, environment.local_rank, threads, environment.ranks_to_bind())
          .context;
  comm::BootstrapOptions bootstrap;
  bootstrap.backend = options.backend;
  bootstrap.init_timeout = options.init_timeout;
  bootstrap.communicator = {options.timeout, rank.context};
  bootstrap.fingerprint = options.fingerprint;
  bootstrap.on_stuck = [on_stuck = options.on_stuck](const CommError& error,
                                                     const auto& /*ranks*/) {
    if (on_stuck)
      on_stuck(error);
    else
      exit_stuck(error);
  };
  static_cast<comm::RankGroup&>(rank) = comm::bootstrap(environment, bootstrap);
  return rank;
}

void run(const std::function<void(Rank&)>& f, const RankOptions& options) {
  Rank rank = join(options);
  try {
    f(rank);
  } catch (const std::exception& error) {
    if (rank.world_size() > 1)
      publish(rank, rank.rank(), rank.ranks[static_cast<std::size_t>(rank.rank())].process(),
              error);
    throw;
  }
}

void run_threads(int world_size, const std::function<void(Rank&)>& f, const RankOptions& options) {
  const auto group = std::make_shared<comm::ThreadGroup>(world_size);
  const auto store = std::make_shared<comm::MemoryStore>();
  const int threads = default_threads(options.threads, world_size);
  std::mutex mutex;
  std::exception_ptr first;
  const auto failed = [&](int number, const std::exception& error) {
    {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    Rank rank;
    rank.store = store;
    publish(rank, number, "a thread", error);
    group->fail(
        CommError(CommFailure::Aborted, {number}, "rank {} failed: {}", number, error.what()));
  };
  const auto body = [&](int number) {
    try {
      Rank rank;
      rank.timeout = options.timeout;
      rank.context = open_device(options.device, number, threads).context;
      rank.store = store;
      for (int other = 0; other < world_size; ++other)
        rank.ranks.push_back(comm::make_hello(other, world_size, rank.run_id, options.fingerprint));
      rank.status = std::make_shared<comm::RankStatus>(
          rank.ranks[static_cast<std::size_t>(number)].process());
      rank.communicator = world_size == 1 ? comm::make_single_communicator()
                                          : comm::make_threads_communicator(
                                                group, number, {options.timeout, rank.context});
      if (world_size > 1 && rank.context->device().type == DeviceType::CUDA)
        rank.communicator =
            comm::make_host_staged_communicator(std::move(rank.communicator), rank.context);
      f(rank);
    } catch (const std::exception& error) {
      failed(number, error);
    } catch (...) {
      failed(number, std::runtime_error("an exception that is no std::exception"));
    }
  };
  std::vector<std::thread> ranks;
  for (int number = 1; number < world_size; ++number) ranks.emplace_back(body, number);
  body(0);
  for (std::thread& rank : ranks) rank.join();
  if (first) std::rethrow_exception(first);
}

int default_threads(std::int64_t asked, int local_ranks) {
  if (asked > 0) return static_cast<int>(asked);
  if (const char* variable = std::getenv("OMP_NUM_THREADS");
      variable != nullptr && *variable != 0) {
    int threads = 0;
    // "4,2" gives the threads per nesting level; use the first number.
    const auto [end, status] = std::from_chars(variable, variable + std::strlen(variable), threads);
    require(status == std::errc() && (*end == 0 || *end == ',') && threads >= 1,
            "OMP_NUM_THREADS must be a number of threads, 1 or more, got '{}'", variable);
    return threads;
  }
  return share_of_rank(this_process_processors(), 0, local_ranks).threads;
}

}  // namespace tessera::train
