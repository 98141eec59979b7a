#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/control/launch_environment.h"
#include "comm/control/rendezvous.h"
#include "comm/control/store.h"
#include "comm/nccl.h"
#include "comm/queued_communicator.h"

namespace tessera::comm {

struct BootstrapOptions {
  /// "shm", "gloo" or "nccl": this one. "auto": NCCL if all ranks compute on GPUs, each on one of
  /// its own, and all can load it; else shared memory if all ranks are on one host and can share
  /// some; else Gloo. Shared memory and Gloo serve a device's context by staging. A group of one
  /// needs none of them.
  ///
  /// NCCL refuses ranks of one host that share a GPU, and so do we, in words. For tests on a single
  /// GPU, TESSERA_NCCL_SHARE_DEVICES=1 in the environment lets them through; then each process also
  /// needs an NCCL_HOSTID of its own, and NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo
  /// NCCL_PROTO=Simple NCCL_MAX_CTAS=1.
  std::string backend = "auto";
  /// Until all ranks have met and connected.
  std::chrono::milliseconds init_timeout{60'000};
  /// Default deadline of a collective; and the context, whose device's memory the communicator
  /// takes beside the host's, and in which staging is booked.
  CommunicatorOptions communicator = {};
  /// What must be equal on all ranks; see Hello.
  std::string fingerprint = {};
  /// How NCCL is opened.
  NcclOpener open_nccl = [](Context& context) { return comm::open_nccl(context); };
};

/// What a rank needs to work with the others. Destroy the communicator first; on the rank that
/// serves the store, the store then waits for the others to go, at most 2 s.
struct RankGroup {
  std::shared_ptr<Store> store;
  std::unique_ptr<Communicator> communicator;
  /// Why "auto" did not take NCCL for ranks on a device, and why not shared memory; on every rank
  /// the same. Empty if it did, or did not come to the question.
  std::string why_not_nccl, why_not_shared_memory;
  /// The processes, by rank.
  std::vector<Hello> ranks;
};

/// Joins the run that `environment` tells of: the store, the rendezvous, the connections.
/// @throws Unsupported or InvalidArgument for the backend (which must be the same on all ranks),
/// CommError if not all ranks come
RankGroup bootstrap(const LaunchEnvironment& environment, const BootstrapOptions& options);

}  // namespace tessera::comm
