#include "comm/control/launch_environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "comm/control/socket.h"
#include "core/base/error.h"
#include "core/base/rng.h"

extern char** environ;

namespace tessera::comm {
namespace {

// Ports that rank 0 may try if the first is taken.
constexpr int kPortsToTry = 16;

template <typename Int>
Int parse(std::string_view name, std::string_view text, Int low, Int high) {
  Int value{};
  require(parse_number(text, value) && value >= low && value <= high,
          "{}: expected an integer from {} to {}, got '{}'", name, low, high, text);
  return value;
}

class Reader {
 public:
  Reader(const Variables& variables, Launcher launcher)
      : variables_(variables), launcher_(launcher) {}

  bool has(std::string_view name) const { return variables_.find(name) != variables_.end(); }
  std::string text(std::string_view name, std::string_view otherwise) const {
    const auto found = variables_.find(name);
    return found == variables_.end() ? std::string(otherwise) : found->second;
  }
  std::string text(std::string_view name) const {
    require(has(name),
            "the environment looks like that of {}, but the variable {} is not set; set it, "
            "or unset the launcher's other variables",
            launcher_name(launcher_), name);
    return variables_.find(name)->second;
  }
  int number(std::string_view name) const { return parse(name, text(name), 0, 1'000'000); }
  int number(std::string_view name, int otherwise) const {
    return has(name) ? number(name) : otherwise;
  }
  /// @param rank, ...  names of the variables; empty: unset
  LaunchEnvironment ranks(std::string_view rank, std::string_view world_size,
                          std::string_view local_rank = {},
                          std::string_view local_world_size = {}) const {
    LaunchEnvironment env;
    env.launcher = launcher_;
    env.rank = number(rank);
    env.world_size = number(world_size);
    if (!local_rank.empty()) env.local_rank = number(local_rank);
    if (!local_world_size.empty()) env.local_world_size = number(local_world_size);
    return env;
  }

 private:
  const Variables& variables_;
  const Launcher launcher_;
};

void set_endpoint(LaunchEnvironment& env, std::string_view name, std::string_view endpoint) {
  const std::size_t colon = endpoint.rfind(':');
  require(colon != endpoint.npos && colon > 0, "{}: expected host:port, got '{}'", name, endpoint);
  std::string_view host = endpoint.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);  // an IPv6 address
  }
  env.address = host;
  env.port = parse<std::uint16_t>(name, endpoint.substr(colon + 1), 1, 65535);
}

// Derives a port from the job id: the same on all ranks, and outside the ephemeral range.
std::uint16_t port_of_job(std::string_view job) {
  return static_cast<std::uint16_t>(20000 + hash_text(job) % 10000);
}

// @return false if TESSERA_RENDEZVOUS is not set
bool take_given_endpoint(LaunchEnvironment& env, const Reader& reader) {
  constexpr std::string_view kName = "TESSERA_RENDEZVOUS";
  if (!reader.has(kName)) return false;
  set_endpoint(env, kName, reader.text(kName));
  return true;
}

// Chooses the store's address for launchers that set ranks but no address.
void choose_endpoint(LaunchEnvironment& env, const Reader& reader) {
  if (env.world_size == 1 || take_given_endpoint(env, reader)) return;
  env.ports = kPortsToTry;
  if (reader.has("MASTER_ADDR")) {
    env.address = reader.text("MASTER_ADDR");
    env.port = reader.has("MASTER_PORT")
                   ? parse<std::uint16_t>("MASTER_PORT", reader.text("MASTER_PORT"), 1, 65000)
                   : port_of_job(env.run_id);
    return;
  }
  env.port = port_of_job(env.run_id);
  if (env.launcher == Launcher::Srun && reader.has("SLURM_JOB_NODELIST")) {
    env.address = first_slurm_host(reader.text("SLURM_JOB_NODELIST"));
    return;
  }
  require(env.local_world_size == env.world_size,
          "{} started {} of {} ranks on this host and gives no address of rank 0; set "
          "TESSERA_RENDEZVOUS=host:port to an address of rank 0's host on all ranks",
          launcher_name(env.launcher), env.local_world_size, env.world_size);
  env.address = "127.0.0.1";
}

void check_ranks(const LaunchEnvironment& env) {
  require(env.world_size >= 1 && env.rank < env.world_size && env.rank >= 0,
          "{}: rank {} is out of range for world size {}: ranks count from 0",
          launcher_name(env.launcher), env.rank, env.world_size);
  require(env.local_rank >= 0 && env.local_rank < env.local_world_size &&
              env.local_world_size <= env.world_size,
          "{}: local rank {} does not fit {} ranks on this host, of {} in all",
          launcher_name(env.launcher), env.local_rank, env.local_world_size, env.world_size);
}

LaunchEnvironment from_flags(const LaunchFlags& flags, const Reader& reader) {
  LaunchEnvironment env;
  env.launcher = Launcher::Flags;
  require(flags.rank.has_value(), "--rank is missing; --rank and --world-size go together");
  require(flags.world_size.has_value(),
          "--world-size is missing; --rank and --world-size go together");
  env.rank = *flags.rank;
  env.world_size = *flags.world_size;
  require(!flags.rendezvous.empty() || env.world_size == 1,
          "--rdzv host:port is missing: {} ranks need an address of rank 0's host", env.world_size);
  if (!flags.rendezvous.empty()) set_endpoint(env, "--rdzv", flags.rendezvous);
  env.local_rank = flags.local_rank.value_or(env.rank);
  // The number of ranks on this host is unknown, so guess it.
  env.knows_local_world_size = env.world_size == 1;
  env.local_world_size = std::max(env.local_rank + 1, flags.local_rank ? 1 : env.world_size);
  env.run_id = reader.text("TESSERA_RUN_ID", flags.rendezvous);
  return env;
}

LaunchEnvironment from_torchrun(const Reader& reader) {
  LaunchEnvironment env = reader.ranks("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  if (reader.has("TESSERA_RENDEZVOUS") && reader.has("TESSERA_RUN_ID") &&
      !reader.has("TORCHELASTIC_RUN_ID")) {
    env.launcher = Launcher::Tessera;
    take_given_endpoint(env, reader);
    env.run_id = reader.text("TESSERA_RUN_ID");
    env.rank_zero_serves = false;
    return env;
  }
  // Without TORCHELASTIC_RESTART_COUNT: after a failure on one host, the others restart uncounted.
  env.run_id = reader.text("TORCHELASTIC_RUN_ID", "torchrun");
  if (take_given_endpoint(env, reader)) return env;
  env.address = reader.text("MASTER_ADDR");
  const auto taken =
      parse<std::uint16_t>("MASTER_PORT", reader.text("MASTER_PORT"), 1, 65535 - kPortsToTry);
  env.port = static_cast<std::uint16_t>(taken + 1);
  env.ports = kPortsToTry;
  return env;
}

bool is_operator(const Reader& reader) {
  const auto has = [&](std::string_view name) { return reader.has(name); };
  if (!has("RANK") || !has("WORLD_SIZE")) return false;
  if (has("LOCAL_RANK") || has("LOCAL_WORLD_SIZE") || has("TORCHELASTIC_RUN_ID")) return false;
  return has("MASTER_ADDR") || has("MASTER_PORT") || reader.text("WORLD_SIZE") == "1";
}

// Kubernetes operators start one rank per pod and open MASTER_PORT for it. No torchrun occupies the
// port.
LaunchEnvironment from_operator(const Reader& reader) {
  LaunchEnvironment env = reader.ranks("RANK", "WORLD_SIZE");
  // Does not contain MASTER_ADDR, because some operators give rank 0 another name there.
  env.run_id = reader.text("TESSERA_RUN_ID", "operator");
  if (env.world_size == 1 || take_given_endpoint(env, reader)) return env;
  env.address = reader.text("MASTER_ADDR");
  env.port = parse<std::uint16_t>("MASTER_PORT", reader.text("MASTER_PORT"), 1, 65535);
  return env;
}

LaunchEnvironment from_open_mpi(const Reader& reader) {
  LaunchEnvironment env = reader.ranks("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                       "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  env.run_id =
      reader.text("TESSERA_RUN_ID",
                  reader.text("PMIX_NAMESPACE", reader.text("OMPI_MCA_ess_base_jobid", "mpirun")));
  choose_endpoint(env, reader);
  return env;
}

LaunchEnvironment from_mpich(const Reader& reader) {
  LaunchEnvironment env =
      reader.ranks("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
  env.run_id = reader.text("TESSERA_RUN_ID", reader.text("PMI_KVS", "mpiexec"));
  choose_endpoint(env, reader);
  return env;
}

LaunchEnvironment from_srun(const Reader& reader) {
  LaunchEnvironment env = reader.ranks("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID");
  const bool one_node = reader.number("SLURM_STEP_NUM_NODES", 1) == 1;
  env.local_world_size = one_node ? env.world_size : env.local_rank + 1;
  env.knows_local_world_size = one_node;
  // "2(x3),1" lists the ranks of each node. It is usable only if all nodes have equally many.
  const std::string tasks = reader.text("SLURM_STEP_TASKS_PER_NODE", "");
  if (!tasks.empty() && tasks.find(',') == tasks.npos) {
    env.local_world_size = parse("SLURM_STEP_TASKS_PER_NODE",
                                 std::string_view(tasks).substr(0, tasks.find('(')), 1, 1'000'000);
    env.knows_local_world_size = true;
  }
  env.run_id = reader.text(
      "TESSERA_RUN_ID", reader.text("SLURM_JOB_ID", "srun") + "." + reader.text("SLURM_STEP_ID"));
  choose_endpoint(env, reader);
  return env;
}

}  // namespace

std::string launcher_name(Launcher launcher) {
  static constexpr std::array kNames = {
      "none",  "flags", "tessera --nproc", "torchrun", "a cluster operator", "Open MPI",
      "MPICH", "srun"};
  return kNames.at(static_cast<std::size_t>(launcher));
}

std::string LaunchEnvironment::describe() const {
  std::string text = fmt::format("rank {} of {} (local {} of {}), launcher: {}", rank, world_size,
                                 local_rank, local_world_size, launcher_name(launcher));
  if (!address.empty()) text += fmt::format(", rendezvous at {}:{}", address, port);
  return text;
}

Variables process_environment() {
  Variables variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equal = text.find('=');
    if (equal != text.npos) variables.emplace(text.substr(0, equal), text.substr(equal + 1));
  }
  return variables;
}

LaunchEnvironment detect_launch(const Variables& variables, const LaunchFlags& flags) {
  const auto has = [&](std::string_view name) { return variables.find(name) != variables.end(); };
  const auto reader = [&](Launcher launcher) { return Reader(variables, launcher); };
  LaunchEnvironment env;
  if (flags.rank || flags.world_size || flags.local_rank || !flags.rendezvous.empty()) {
    env = from_flags(flags, reader(Launcher::Flags));
  } else if (is_operator(reader(Launcher::Operator))) {
    env = from_operator(reader(Launcher::Operator));
  } else if (has("RANK") || has("WORLD_SIZE") || has("LOCAL_RANK")) {
    env = from_torchrun(reader(Launcher::Torchrun));
  } else if (has("OMPI_COMM_WORLD_RANK") || has("OMPI_COMM_WORLD_SIZE")) {
    env = from_open_mpi(reader(Launcher::OpenMpi));
  } else if (has("PMI_RANK") || has("PMI_SIZE")) {
    env = from_mpich(reader(Launcher::Mpich));
  } else if (has("SLURM_STEP_ID") && has("SLURM_PROCID")) {
    // A batch shell has SLURM_PROCID too, but no step.
    env = from_srun(reader(Launcher::Srun));
  }
  check_ranks(env);
  return env;
}

std::string first_slurm_host(std::string_view nodelist) {
  const std::size_t bracket = nodelist.find('[');
  const std::size_t comma = nodelist.find(',');
  if (bracket == nodelist.npos || comma < bracket) {
    const std::string_view host = nodelist.substr(0, comma);
    require(!host.empty(), "SLURM_JOB_NODELIST: expected a list of hosts, got '{}'", nodelist);
    return std::string(host);
  }
  const std::string_view inside = nodelist.substr(bracket + 1);
  const std::size_t end = inside.find_first_of(",-]");
  require(end != inside.npos && end > 0, "SLURM_JOB_NODELIST: cannot read '{}'", nodelist);
  return std::string(nodelist.substr(0, bracket)) + std::string(inside.substr(0, end));
}

}  // namespace tessera::comm
