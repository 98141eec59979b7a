#include "comm/control/launch_environment.h"

#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using comm::detect_launch;
using comm::Launcher;
using comm::LaunchFlags;
using comm::Variables;

namespace {

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_RUN_ID", "job7"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"}};  // differs between hosts
const Variables kSrun = {{"SLURM_PROCID", "3"},         {"SLURM_NTASKS", "4"},
                         {"SLURM_LOCALID", "1"},        {"SLURM_STEP_ID", "0"},
                         {"SLURM_JOB_ID", "99"},        {"SLURM_JOB_NODELIST", "gpu[07-08]"},
                         {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "prterun-1"}};
const Variables kMpich = {
    {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};

Variables without(Variables variables, const char* name) {
  variables.erase(name);
  return variables;
}
Variables with(Variables variables, const char* name, const char* value) {
  variables[name] = value;
  return variables;
}

void check_ranks(const comm::LaunchEnvironment& e, int rank, int world, int local,
                 int local_world) {
  CHECK(e.rank == rank);
  CHECK(e.world_size == world);
  CHECK(e.local_rank == local);
  CHECK(e.local_world_size == local_world);
}

}  // namespace

TEST_CASE("no launcher: one rank") {
  const auto e = detect_launch({{"PATH", "/bin"}, {"MASTER_ADDR", "x"}});
  CHECK(e.launcher == Launcher::None);
  check_ranks(e, 0, 1, 0, 1);
}

TEST_CASE("tessera's launcher") {
  Variables v = kTorchrun;
  v.erase("TORCHELASTIC_RUN_ID");
  v["TESSERA_RENDEZVOUS"] = "127.0.0.1:4567";
  v["TESSERA_RUN_ID"] = "abc";
  const auto e = detect_launch(v);
  CHECK(e.launcher == Launcher::Tessera);
  check_ranks(e, 5, 8, 1, 4);
  CHECK(e.address == "127.0.0.1");
  CHECK(e.port == 4567);
  CHECK(e.run_id == "abc");
  CHECK_FALSE(e.rank_zero_serves);
  CHECK(e.describe() ==
        "rank 5 of 8 (local 1 of 4), launcher: tessera --nproc, rendezvous at 127.0.0.1:4567");
}

TEST_CASE("torchrun: its port + 1, and one run id for all restarts") {
  const auto e = detect_launch(kTorchrun);
  CHECK(e.launcher == Launcher::Torchrun);
  check_ranks(e, 5, 8, 1, 4);
  CHECK(e.address == "10.0.0.1");
  CHECK(e.port == 29501);
  CHECK(e.ports > 1);
  CHECK(e.run_id == "job7");
  CHECK(e.rank_zero_serves);
}

TEST_CASE("a cluster operator: one rank per host, on exactly the port that it opened") {
  const Variables variables = {{"RANK", "2"},
                               {"WORLD_SIZE", "3"},
                               {"MASTER_ADDR", "job-master-0"},
                               {"MASTER_PORT", "23456"}};
  const auto e = detect_launch(variables);
  CHECK(e.launcher == Launcher::Operator);
  check_ranks(e, 2, 3, 0, 1);
  CHECK(e.address == "job-master-0");
  CHECK(e.port == 23456);
  CHECK(e.ports == 1);
  CHECK(e.rank_zero_serves);
  // Rank 0's host may have another name for itself.
  const auto zero = detect_launch(with(with(variables, "MASTER_ADDR", "localhost"), "RANK", "0"));
  CHECK(zero.run_id == e.run_id);
  CHECK(detect_launch(with(variables, "TESSERA_RENDEZVOUS", "h:9")).address == "h");
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    CHECK_THROWS_HOLDING(
        InvalidArgument,
        fmt::format("looks like that of a cluster operator, but the variable {}", name),
        detect_launch(without(variables, name)));
  }
  CHECK_THROWS_HOLDING(InvalidArgument, "variable WORLD_SIZE is not set",
                       detect_launch(without(variables, "WORLD_SIZE")));
  check_ranks(detect_launch({{"RANK", "0"}, {"WORLD_SIZE", "1"}}), 0, 1, 0, 1);
  CHECK_THROWS_HOLDING(InvalidArgument, "variable LOCAL_RANK is not set",
                       detect_launch({{"RANK", "0"}, {"WORLD_SIZE", "2"}}));
}

TEST_CASE("srun: the first node, tasks per node, and only inside a step") {
  const auto e = detect_launch(kSrun);
  CHECK(e.launcher == Launcher::Srun);
  check_ranks(e, 3, 4, 1, 2);
  CHECK(e.address == "gpu07");
  CHECK(e.run_id == "99.0");
  CHECK(detect_launch(with(kSrun, "SLURM_PROCID", "0")).port == e.port);
  CHECK(detect_launch(without(kSrun, "SLURM_STEP_ID")).launcher == Launcher::None);
}

TEST_CASE("Open MPI and MPICH on one host, and on several") {
  auto e = detect_launch(kOpenMpi);
  CHECK(e.launcher == Launcher::OpenMpi);
  check_ranks(e, 1, 2, 1, 2);
  CHECK(e.address == "127.0.0.1");
  CHECK(e.port >= 1024);
  e = detect_launch(kMpich);
  CHECK(e.launcher == Launcher::Mpich);
  check_ranks(e, 0, 2, 0, 2);
  const Variables several =
      with(with(kOpenMpi, "OMPI_COMM_WORLD_SIZE", "4"), "OMPI_COMM_WORLD_RANK", "3");
  CHECK_THROWS_HOLDING(InvalidArgument, "set TESSERA_RENDEZVOUS=host:port", detect_launch(several));
  e = detect_launch(with(several, "TESSERA_RENDEZVOUS", "[fe80::1]:900"));
  CHECK(e.address == "fe80::1");
  CHECK(e.port == 900);
}

TEST_CASE("flags override all variables") {
  LaunchFlags flags;
  flags.rank = 2;
  flags.world_size = 3;
  flags.rendezvous = "host:1234";
  auto e = detect_launch(kTorchrun, flags);
  CHECK(e.launcher == Launcher::Flags);
  check_ranks(e, 2, 3, 2, 3);
  CHECK(e.address == "host");
  CHECK(e.port == 1234);
  flags.local_rank = 0;
  CHECK(detect_launch({}, flags).local_rank == 0);
  flags.rendezvous.clear();
  CHECK_THROWS_HOLDING(InvalidArgument, "--rdzv host:port is missing", detect_launch({}, flags));
  flags.world_size.reset();
  CHECK_THROWS_HOLDING(InvalidArgument, "--world-size is missing", detect_launch({}, flags));
}

TEST_CASE("ranks are bound to parts of a host only where their number on it is known") {
  CHECK(detect_launch(kTorchrun).ranks_to_bind() == detect_launch(kTorchrun).local_world_size);
  CHECK(detect_launch(with(kSrun, "SLURM_STEP_TASKS_PER_NODE", "2(x2)")).ranks_to_bind() == 2);
  auto uneven = with(with(kSrun, "SLURM_STEP_NUM_NODES", "2"), "SLURM_STEP_TASKS_PER_NODE", "3,1");
  CHECK(detect_launch(uneven).ranks_to_bind() == 1);
  LaunchFlags flags{.rank = 1, .world_size = 2, .local_rank = {}, .rendezvous = "host:1234"};
  CHECK(detect_launch({}, flags).ranks_to_bind() == 1);  // perhaps one on each of two hosts
  flags.local_rank = 1;
  CHECK(detect_launch({}, flags).ranks_to_bind() == 1);  // another guess than of local rank 0
}

TEST_CASE("an incomplete set of variables names the missing one") {
  const auto check = [](const Variables& all, const std::vector<const char*>& needed) {
    for (const char* name : needed) {
      CHECK_THROWS_HOLDING(InvalidArgument, fmt::format("variable {} is not set", name),
                           detect_launch(without(all, name)));
    }
  };
  check(kTorchrun,
        {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"});
  check(kOpenMpi, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                   "OMPI_COMM_WORLD_LOCAL_SIZE"});
  check(kMpich, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});
  check(kSrun, {"SLURM_NTASKS", "SLURM_LOCALID"});
}

TEST_CASE("non-numeric and out-of-range values are refused with the value") {
  CHECK_THROWS_HOLDING(InvalidArgument, "RANK: expected an integer from 0 to 1000000, got '1x'",
                       detect_launch(with(kTorchrun, "RANK", "1x")));
  CHECK_THROWS_HOLDING(InvalidArgument, "got '-1'", detect_launch(with(kTorchrun, "RANK", "-1")));
  CHECK_THROWS_HOLDING(InvalidArgument, "rank 8 is out of range for world size 8",
                       detect_launch(with(kTorchrun, "RANK", "8")));
  CHECK_THROWS_HOLDING(InvalidArgument, "local rank 4 does not fit",
                       detect_launch(with(kTorchrun, "LOCAL_RANK", "4")));
  CHECK_THROWS_HOLDING(InvalidArgument, "MASTER_PORT",
                       detect_launch(with(kTorchrun, "MASTER_PORT", "70000")));
  CHECK_THROWS_HOLDING(
      InvalidArgument, "expected host:port, got 'nowhere'",
      detect_launch(
          with(kOpenMpi, "TESSERA_RENDEZVOUS", "nowhere"),
          LaunchFlags{.rank = 0, .world_size = 2, .local_rank = {}, .rendezvous = "nowhere"}));
}

TEST_CASE("Slurm node lists") {
  CHECK(comm::first_slurm_host("node1") == "node1");
  CHECK(comm::first_slurm_host("node1,node2") == "node1");
  CHECK(comm::first_slurm_host("n[003-010,20],x1") == "n003");
  CHECK(comm::first_slurm_host("a,n[1-2]") == "a");
  CHECK(comm::first_slurm_host("n[7]") == "n7");
  for (const char* bad : {"", ",a", "n[", "n[]"}) {
    CHECK_THROWS_HOLDING(InvalidArgument, "SLURM_JOB_NODELIST", comm::first_slurm_host(bad));
  }
}
