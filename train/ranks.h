#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "core/base/context.h"
#include "core/base/error.h"

namespace tessera::train {

struct RankOptions {
  std::string device = "auto";                     ///< auto, cpu, cuda or cuda:N; see open_device()
  int threads = 0;                                 ///< host threads per rank; 0: default_threads()
  std::string backend = "auto";                    ///< see comm::BootstrapOptions
  std::chrono::milliseconds init_timeout{60'000};  ///< for all ranks to arrive
  std::chrono::milliseconds timeout{300'000};      ///< of a collective, and of exchange()
  /// Text that must be equal on all ranks, such as the configuration.
  std::string fingerprint{};
  /// Called on another thread if this process still runs seconds after the run has failed, such as
  /// in a hanging read. Empty: the error goes to standard error, and the process exits with 4.
  std::function<void(const CommError& error)> on_stuck{};
};

/// A rank of a program: its device, and its connections to the other ranks.
struct Rank : comm::RankGroup {
  std::shared_ptr<Context> context;
  int rank() const { return communicator->rank(); }
  int world_size() const { return communicator->world_size(); }
  /// All-gathers short texts over the control channel. Collective.
  /// @throws CommError naming the ranks that did not answer in time
  std::vector<std::string> exchange(const std::string& mine);
  /// A name that no earlier call returned, equal on all ranks that call it equally often.
  std::string unique_name(const std::string& prefix);

  std::string run_id = "run";  ///< equal on all ranks: letters, digits, '.', '_' or '-'
  std::chrono::milliseconds timeout{};
  int names = 0;
};

/// Joins the ranks that `tessera run`, torchrun, srun or mpirun started; a world of one without a
/// launcher. Removes the run's secret, TESSERA_TOKEN, from the environment.
/// @throws as comm::bootstrap and open_device
Rank join(const RankOptions& options = {});

/// Joins, and calls f(rank). An error is published, so that the other ranks end and name this rank,
/// and thrown.
void run(const std::function<void(Rank&)>& f, const RankOptions& options = {});

/// Calls f(rank) for `world_size` ranks, each on a thread of its own. When a rank throws, the others
/// end at their next collective or exchange. Of the options, device, threads and timeout apply.
/// @throws the first error of any rank
void run_threads(int world_size, const std::function<void(Rank&)>& f,
                 const RankOptions& options = {});

/// Threads of a process: `asked`, else OMP_NUM_THREADS, else those of share_of_rank().
/// @throws InvalidArgument on a malformed variable
int default_threads(std::int64_t asked, int local_ranks);

}  // namespace tessera::train
