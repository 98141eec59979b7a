#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

namespace tessera::comm {

enum class Launcher { None, Flags, Tessera, Torchrun, Operator, OpenMpi, Mpich, Srun };
/// "none", "flags", "tessera --nproc", "torchrun", "a cluster operator", "Open MPI", "MPICH",
/// "srun"
std::string launcher_name(Launcher launcher);

/// --rank, --world-size, --local-rank, --rdzv host:port; --local-rank is optional, the others go
/// together.
struct LaunchFlags {
  std::optional<int> rank = {}, world_size = {}, local_rank = {};
  std::string rendezvous = {};
};

/// This process's rank, and the address of the store.
struct LaunchEnvironment {
  Launcher launcher = Launcher::None;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  /// False: local_world_size is a guess, which may differ between the ranks of a host.
  bool knows_local_world_size = true;
  /// Address of the store; empty for one rank.
  std::string address;
  std::uint16_t port = 0;
  /// Rank 0 listens on the first free one of this many ports, starting at `port`.
  int ports = 1;
  /// Distinguishes the runs on one host.
  std::string run_id;
  /// True if rank 0 serves the store; false if the launcher does.
  bool rank_zero_serves = true;
  /// Address on which rank 0 listens; empty: `address`.
  std::string bind = {};
  /// The run's secret, from read_token(). detect_launch() sets neither `token` nor `bind`.
  std::string token = {};

  /// Ranks that may divide this host's processors by their local ranks: 1 if the number is a guess.
  int ranks_to_bind() const { return knows_local_world_size ? local_world_size : 1; }
  /// "rank 2 of 4 (local 0 of 2), launcher: torchrun, rendezvous at 10.0.0.1:29501"; without the
  /// token
  std::string describe() const;
};

using Variables = std::map<std::string, std::string, std::less<>>;
Variables process_environment();

/// Detects the launcher: by flags, then by the variables of `tessera --nproc`, torchrun, a cluster
/// operator (RANK and WORLD_SIZE without a local rank: one rank per host), Open MPI, MPICH and
/// srun, in this order. Pure.
///
/// The store's address is the first of these that is set:
/// - --rdzv, or TESSERA_RENDEZVOUS (host:port) under any launcher
/// - torchrun: MASTER_ADDR and the ports after MASTER_PORT, which torchrun itself uses
/// - cluster operator: MASTER_ADDR and MASTER_PORT, the only port that is open
/// - others: MASTER_ADDR, with MASTER_PORT or a port derived from the job's id
/// - the first host of SLURM_JOB_NODELIST, or loopback if all ranks are local, with a port derived
///   from the job's id
///
/// @throws InvalidArgument naming the variable that is missing or malformed
LaunchEnvironment detect_launch(const Variables& variables, const LaunchFlags& flags = {});

/// First host of a Slurm node list: "node[03-05,7],x1" gives "node03".
std::string first_slurm_host(std::string_view nodelist);

}  // namespace tessera::comm
