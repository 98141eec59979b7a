#include "tools/tessera/train/run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "comm/bootstrap.h"
#include "comm/control/agreement.h"
#include "comm/control/comparison.h"
#include "core/base/choose_device.h"
#include "core/base/device_backend.h"
#include "core/base/memory.h"
#include "core/base/processors.h"
#include "core/base/system_memory.h"
#include "core/base/thread_pool.h"
#include "tools/tessera/command.h"
#include "tools/tessera/launch/standard_error.h"
#include "tools/tessera/model/loaded_model.h"
#include "tools/tessera/report/utf8.h"
#include "tools/tessera/signal/stop_signal.h"
#include "tools/tessera/train/advice.h"
#include "tools/tessera/train/fingerprint.h"
#include "tools/tessera/train/flight.h"
#include "tools/tessera/train/memory_advice.h"
#include "tools/tessera/train/memory_plan.h"
#include "tools/tessera/train/rank.h"
#include "tools/tessera/train/resume.h"
#include "tools/tessera/train/run_directory.h"
#include "tools/tessera/train/setup.h"
#include "train/fault_line.h"
#include "train/tuned_products.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

// Time for the heartbeat to detect a failure that a call of the store has reported.
constexpr std::chrono::milliseconds kDetection{1000};

// Throws at the start if the trace can't be written, instead of after the traced steps.
void check_profile(const Config& config, int rank) {
  if (config.train.profile.empty()) return;
  const fs::path file = fs::absolute(profile_file(config, rank));
  io::require_replaceable(file);
  const fs::path folder = file.parent_path();
  require<IoError>(::access(folder.c_str(), W_OK | X_OK) == 0,
                   "train.profile: cannot write a file in {}: {}", folder.string(),
                   std::strerror(errno));
}

std::vector<std::string> start_notes(const comm::RankGroup& group, const ChosenDevice& chosen,
                                     const comm::FlightRecorder& recorder) {
  std::vector<std::string> notes;
  const std::string_view backend = group.communicator->backend();
  if (!group.why_not_nccl.empty()) {
    notes.push_back(fmt::format("note: ranks use {}, not NCCL: {}", backend, group.why_not_nccl));
  }
  if (!group.why_not_shared_memory.empty()) {
    notes.push_back(fmt::format("note: ranks use {}, not shared memory: {}", backend,
                                group.why_not_shared_memory));
  }
  if (!recorder.why_not_in_file().empty()) {
    notes.push_back("note: flight records are in memory only, and lost with a killed rank: " +
                    recorder.why_not_in_file());
  }
  if (!chosen.why_cpu.empty())
    notes.push_back("note: training on the CPU; `tessera doctor` explains why no GPU is used");
  return notes;
}

PlanOptions plan_options(const RunSetup& setup, const comm::LaunchEnvironment& environment,
                         const comm::Communicator& communicator, Context& context) {
  return {.context = {.device = context.device(),
                      .threads = context.threads().size(),
                      .cpu_level = context.cpu_level(),
                      .planned_limits = context.limits()},
          .backend = std::string(communicator.backend()),
          .local_world_size = environment.local_world_size,
          .evaluates = setup.val != nullptr,
          .packed = setup.train->is_packed(),
          .prompt_tokens = prompt_tokens(setup),
          .first_step = setup.state.step};
}

// Checks the memory plan before anything is allocated. Only a host's first rank checks host memory.
// @return a warning, or empty
std::string check_room(const RunSetup& setup, const RankPlan& plan, const PlanPeak& peak,
                       const comm::LaunchEnvironment& environment,
                       const std::vector<comm::Hello>& ranks, Context& context) {
  const Config& config = setup.config;
  const DeviceType device = context.device().type;
  const std::int64_t limit = config.train.memory_limit;
  const bool refuse = config.train.memory_check == "refuse";
  const auto advice = [&] { return memory_advice(config, environment.world_size, device, peak); };
  std::vector<int> here;
  for (const comm::Hello& hello : ranks)
    if (hello.host == ranks[static_cast<std::size_t>(environment.rank)].host)
      here.push_back(hello.rank);
  MemoryNeed need;
  need.plan = plan;
  need.memory = system_memory();
  need.there = "this host has";
  need.ranks = static_cast<int>(here.size());
  if (device == DeviceType::CUDA) {
    MemoryNeed on_host = need;
    on_host.plan = RankPlan();
    on_host.plan.peak = plan.offloaded + plan.host_peak;
    if (here.front() == environment.rank)
      if (std::string warning = check_memory(
              on_host, [] { return MemoryAdvice(); }, refuse);
          !warning.empty())
        return warning;
    need.memory = context.backend().memory();
    need.there = context.device().str() + " has";
    need.ranks = 1;
    return check_memory(need, advice, refuse);
  }
  if (limit > 0) {
    need.memory = {limit, limit};
    need.there = "train.memory_limit allows";
    need.ranks = 1;
    return check_memory(need, advice, false);
  }
  return here.front() == environment.rank ? check_memory(need, advice, refuse) : std::string();
}

comm::RankGroup join(const Config& config, const comm::LaunchEnvironment& environment,
                     const std::shared_ptr<Context>& context,
                     const std::shared_ptr<comm::RankStatus>& status,
                     const std::shared_ptr<RankFlight>& flight) {
  comm::BootstrapOptions options;
  options.backend = config.comm.backend;
  options.init_timeout = to_milliseconds(config.comm.init_timeout);
  options.communicator = {to_milliseconds(config.comm.timeout), context};
  options.fingerprint = fingerprint(config, context->device());
  options.heartbeat_timeout = to_milliseconds(config.comm.heartbeat_timeout);
  options.status = status;
  options.on_start_id = [flight](std::uint64_t id) { flight->set_start_id(id); };
  options.on_stuck = [status, flight](const CommError& error,
                                      const std::vector<comm::Hello>& ranks) {
    fail_at_once(flight, error, [status, error, ranks] {
      return "tessera: error: " + escaped_lines(train::fault_line(error, status->state(), ranks));
    });
    ::_exit(kCommunication);
  };
  options.on_note = [](const std::string& text) {
    std::cerr << fmt::format("tessera: warning: {}\n", escaped(text));
  };
  std::vector<comm::Hello> met;
  options.on_met = [&met](const std::vector<comm::Hello>& ranks) { met = ranks; };
  try {
    return comm::bootstrap(environment, options);
  } catch (const CommError& error) {
    throw CommError(error.failure(), error.culprits(), "{}",
                    train::fault_line(error, status->state(), met))
        .set_fate(error.fate());
  }
}

// Returns the verdict on a communication error: the error that all ranks agree to report.
CommError agreed(comm::RankGroup& group, const CommError& error, const RankFlight& flight) {
  if (group.ranks.size() < 2) return error;
  std::optional<CommError> verdict = group.heartbeat->verdict();
  if (!verdict) {
    verdict = error;
    if (error.fate() == comm::kNoAnswer) group.store->give_up();
    try {
      verdict = comm::publish_verdict(*group.store, error);
    } catch (const std::exception&) {
      // The store is unreachable; the heartbeat may know why.
      if (auto lost = group.heartbeat->verdict(kDetection)) verdict = lost;
    }
  }
  const std::string last = flight.last_collectives();
  return CommError(verdict->failure(), verdict->culprits(), "{}{}{}",
                   train::fault_line(*verdict, group.status->state(), group.ranks),
                   last.empty() ? "" : "\n  ", last)
      .set_fate(verdict->fate());
}

void report_early_stop(int signal, std::int64_t step, const std::string& run, bool json) {
  std::cerr << fmt::format("stopped by signal {} before the first step\n", signal);
  if (!json) return;
  const nlohmann::ordered_json summary = {
      {"step", step}, {"stopped_by_signal", signal}, {"seconds", 0.0}, {"run", run}};
  std::cout << summary.dump() << std::endl;
}

// Decides with all ranks whether to stop before the first step, when nothing needs saving; SIGUSR1
// stops only after that step. Collective. @return the signal, or 0
int agreed_stop(comm::RankGroup& group, int attempt, int received,
                std::chrono::milliseconds timeout) {
  const std::vector<std::string> all =
      comm::exchange(*group.store, fmt::format("stop/{}", attempt), group.communicator->rank(),
                     group.communicator->world_size(), std::to_string(received), timeout);
  for (const int signal : {SIGTERM, SIGINT})
    if (std::ranges::find(all, std::to_string(signal)) != all.end()) return signal;
  return 0;
}

// Runs `decide` on rank 0 and returns its result, which the store distributes, on every rank.
// @param name  unique for each decision
// @throws on rank 0 the exception of `decide`; on other ranks CommError: Aborted with its text,
//   Timeout at the deadline, or the loss of a rank
std::string decide_on_rank_zero(comm::Store& store, const std::string& name, int rank,
                                std::chrono::milliseconds deadline,
                                const std::function<std::string()>& decide) {
  const std::string key = "decision/" + name;
  if (rank == 0) {
    try {
      std::string result = decide();
      store.set(key, "+" + result);
      return result;
    } catch (const std::exception& error) {
      store.set(key, std::string("-") + error.what());
      throw;
    }
  }
  const std::string answer = [&] {
    try {
      return comm::get_or_verdict(store, key, deadline);
    } catch (const CommError& error) {
      if (error.failure() != CommFailure::Timeout) throw;
      throw CommError(CommFailure::Timeout, {0},
                      "rank 0 did not decide on {} within {} s; check its disk, or raise "
                      "checkpoint.load_timeout",
                      name, static_cast<double>(deadline.count()) / 1e3);
    }
  }();
  if (!answer.starts_with('+')) {
    throw CommError(CommFailure::Aborted, {0}, "rank 0 failed: {}", answer.substr(1));
  }
  return answer.substr(1);
}

int train(Config config, const comm::LaunchEnvironment& environment, comm::RankGroup& group,
          const ChosenDevice& chosen, RankFlight& flight, bool json) {
  // Before this line a signal kills the process.
  StopSignal stop(environment.rank == 0);
  bool agreed_to_start = false;
  std::int64_t first_step = 0;
  const std::shared_ptr<Context>& context = chosen.context;
  check_profile(config, environment.rank);
  const bool is_zero = environment.rank == 0;
  const auto warn = [is_zero](const std::string& text) {
    if (is_zero) std::cerr << fmt::format("tessera: warning: {}\n", escaped(text));
  };
  const std::chrono::milliseconds timeout = to_milliseconds(config.checkpoint.load_timeout);
  comm::FileDescriptor lock;
  std::map<fs::path, std::string> unusable;  // checkpoint -> reason
  std::string skipped;                       // message about the checkpoint skipped last
  std::shared_ptr<comm::FlightRecorder> recorder;
  const auto try_once = [&](int attempt) -> std::optional<int> {
    const std::string resume = decide_on_rank_zero(
        *group.store, fmt::format("resume/{}", attempt), environment.rank, timeout, [&] {
          if (!lock) lock = open_run_directory(config.run.out);
          std::vector<std::string> notes;
          const auto found = find_resume(config.run.out, config.checkpoint.resume, unusable, notes);
          if (!skipped.empty()) warn(skipped);
          for (const std::string& note : notes) warn(note);
          return found ? found->string() : std::string();
        });
    recorder = flight.open();
    group.communicator->set_recorder(recorder);
    const bool on_gpu = context->device().type == DeviceType::CUDA;
    const fs::path tuned = on_gpu ? tuned_products_file(config) : fs::path();
    const std::string tuned_text =
        tuned.empty()
            ? std::string()
            : decide_on_rank_zero(
                  *group.store, fmt::format("tuned products/{}", attempt), environment.rank,
                  timeout,
                  [&] { return train::format_tuned_products(train::open_tuned_products(tuned)); });
    RunSetup setup = set_up(config, environment.world_size,
                            resume.empty() ? std::nullopt : std::optional<fs::path>(resume));
    if (!tuned.empty())
      setup.tuned_products = train::parse_tuned_products(tuned_text, tuned.string());
    if (!on_gpu && !config.train.tuned_products.empty())
      setup.notes.push_back("note: train.tuned_products has no effect on the CPU");
    require_head_dim(setup.model, context->device(), "--train.device cpu");
    for (std::string& note : start_notes(group, chosen, *recorder))
      setup.notes.push_back(std::move(note));
    for (std::string& note :
         advice(setup.config, make_model(setup.config, setup.model)->parameter_count(),
                !setup.resume && !setup.init_from && !setup.adapters,
                this_process_processors().shared(), on_gpu ? 0 : environment.local_world_size))
      setup.notes.push_back(std::move(note));
    require(setup.config.checkpoint.keep_best == 0 || setup.val,
            "checkpoint.keep_best is {}, but there is no validation data; name "
            "some with --data.val FILE, or leave the key out",
            setup.config.checkpoint.keep_best);
    first_step = setup.state.step;
    const bool done = setup.resume && setup.state.step >= setup.config.train.steps;
    const std::string done_text =
        fmt::format("{} is at step {} of {} already; raise --train.steps to continue\n", resume,
                    setup.state.step, setup.config.train.steps);

    const PlanOptions assumed = plan_options(setup, environment, *group.communicator, *context);
    const RankPlan plan =
        plan_rank(setup.config, setup.model, environment.rank, environment.world_size, assumed);
    const PlanPeak peak =
        [&, model = setup.model](const Config& changed) -> std::optional<std::int64_t> {
      try {
        return plan_rank(changed, model, environment.rank, environment.world_size, assumed).peak;
      } catch (const InvalidArgument&) {
        return std::nullopt;
      } catch (const std::bad_alloc&) {  // called after an OutOfMemory error
        return std::nullopt;
      }
    };
    const auto warnings = comm::exchange(
        *group.store, fmt::format("memory/{}", attempt), environment.rank, environment.world_size,
        check_room(setup, plan, peak, environment, group.ranks, *context), timeout);
    for (std::size_t rank = 0; rank < warnings.size(); ++rank) {
      if (!warnings[rank].empty())
        setup.notes.push_back(fmt::format("warning: rank {}: {}", rank, warnings[rank]));
    }

    std::string why;
    const Config resolved = setup.config;
    const int signal = with_memory_advice(resolved, environment.world_size, *context, peak, [&] {
      Rank rank(std::move(setup), plan, environment, group, context, attempt, json, flight);
      comm::compare_among_ranks(
          *group.store,
          attempt == 0 ? "parameter layout" : fmt::format("parameter layout, attempt {}", attempt),
          environment.rank, environment.world_size, rank.layout(), timeout);
      why = rank.load();
      if (!why.empty()) return -1;
      if (const int early = agreed_stop(group, attempt, stop.received(), timeout); early != 0) {
        if (is_zero) report_early_stop(early, first_step, config.run.out, json);
        return early;
      }
      agreed_to_start = true;
      if (done && is_zero) std::cerr << done_text;
      decide_on_rank_zero(*group.store, fmt::format("start/{}", attempt), environment.rank, timeout,
                          [&] { return rank.open_files(), std::string(); });
      return rank.run(stop);
    });
    if (why.empty()) return signal;
    skipped = fmt::format("{} is skipped: {}", resume, why);
    require<InternalError>(unusable.emplace(resume, why).second, "{} was tried twice", resume);
    return std::nullopt;
  };
  try {
    // Each attempt tries an older checkpoint, until all ranks can read it.
    for (int attempt = 0;; ++attempt) {
      const std::optional<int> signal = try_once(attempt);
      if (!signal) continue;
      recorder->end(comm::FlightEnd::Done,
                    *signal == 0 ? "" : fmt::format("stopped by signal {}", *signal));
      return *signal == 0 ? 0 : stop_exit_code(*signal);
    }
  } catch (const CommError& error) {
    // The same signal may have killed other ranks before they could agree.
    const int signal = stop.received();
    if (agreed_to_start || (signal != SIGTERM && signal != SIGINT)) {
      flight.fail(error);
      throw;
    }
    flight.end(fmt::format("stopped by signal {}", signal));
    agreed(group, error, flight);  // notifies ranks that received no signal
    if (is_zero) report_early_stop(signal, first_step, config.run.out, json);
    return stop_exit_code(signal);
  } catch (const std::exception& error) {
    flight.fail(error);
    throw;
  }
}

int join_and_train(Config config, const comm::LaunchEnvironment& environment,
                   const std::string& process, const std::shared_ptr<comm::RankStatus>& status,
                   const std::shared_ptr<RankFlight>& flight, bool json) {
  status->enter("start");
  const ChosenDevice chosen =
      open_device(config.train.device, environment.local_rank,
                  train::default_threads(config.train.threads, environment.local_world_size),
                  environment.ranks_to_bind());
  chosen.context->ledger().set_limit(config.train.memory_limit);
  comm::RankGroup group = join(config, environment, chosen.context, status, flight);
  try {
    return train(std::move(config), environment, group, chosen, *flight, json);
  } catch (const CommError& error) {
    throw CommError(agreed(group, error, *flight));
  } catch (const std::exception& error) {
    if (group.ranks.size() > 1) train::tell_others(*group.store, environment.rank, process, error);
    throw;
  }
}

}  // namespace

int run_rank(Config config, const comm::LaunchEnvironment& environment, bool json) {
  const HeldWarnings held;
  const PatientStandardError log;
  const std::string process =
      comm::make_hello(environment.rank, environment.world_size, {}, {}).process();
  const auto status = std::make_shared<comm::RankStatus>(process);
  // Before everything else, to record any failure.
  const auto flight = std::make_shared<RankFlight>(config.run.out, environment, status);
  try {
    return join_and_train(std::move(config), environment, process, status, flight, json);
  } catch (const std::exception& error) {
    flight->fail(error);
    throw;
  }
}

}  // namespace tessera::tools
