#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/control/launch_environment.h"
#include "comm/control/rendezvous.h"
#include "comm/control/store.h"
#include "comm/queued_communicator.h"

namespace tessera::comm {

struct BootstrapOptions {
  /// "auto": shared memory if all ranks are on one host and can share some, else Gloo; "shm" or
  /// "gloo": this one. "nccl" is Unsupported in this build.
  std::string backend = "auto";
  /// Until all ranks have met and connected.
  std::chrono::milliseconds init_timeout{60'000};
  /// Default deadline of a collective; and what it books staging in.
  CommunicatorOptions communicator = {};
  /// What must be equal on all ranks; see Hello.
  std::string fingerprint = {};
};

/// What a rank needs to work with the others. Destroy the communicator first; on the rank that
/// serves the store, the store then waits for the others to go, at most 2 s.
struct RankGroup {
  std::shared_ptr<Store> store;
  std::unique_ptr<Communicator> communicator;
  /// Why "auto" did not take shared memory, on every rank the same; empty if it did, or was not
  /// asked.
  std::string why_not_shared_memory;
  /// The processes, by rank.
  std::vector<Hello> ranks;
};

/// Joins the run that `environment` tells of: the store, the rendezvous, the connections.
/// @throws Unsupported or InvalidArgument for the backend (which must be the same on all ranks),
/// CommError if not all ranks come
RankGroup bootstrap(const LaunchEnvironment& environment, const BootstrapOptions& options);

}  // namespace tessera::comm
