#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/control/heartbeat.h"
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
  /// A rank that gives no sign of life for so long ends the run, and so does whoever serves the
  /// store. Zero: never.
  std::chrono::milliseconds heartbeat_timeout{4000};
  /// Told, before the ranks wait for each other, a number that all ranks of this start share and no
  /// other start does, also not one whose ranks meet at the same address; never 0. Not called if
  /// the store can't be reached.
  std::function<void(std::uint64_t)> on_start_id = {};
  /// What this process does and where; null: made here. It is not asked for its state when the
  /// group is gone.
  std::shared_ptr<RankStatus> status = {};
  /// Told who the processes are, by rank, once all have met.
  std::function<void(const std::vector<Hello>&)> on_met = {};
  /// On a thread of its own: the run has failed, and this process is still here seconds later.
  std::function<void(const CommError&, const std::vector<Hello>&)> on_stuck = {};
  /// On a thread of its own, where the store is served: what people should know, of slow ranks.
  std::function<void(const std::string&)> on_note = {};
  /// How NCCL is opened.
  NcclOpener open_nccl = [](Context& context) { return comm::open_nccl(context); };
};

/// What a rank needs to work with the others. Members go in the reverse order, and must: the
/// heartbeat uses the communicator, which uses the store. On the rank that serves the store, the
/// store waits for the others to go, at most 2 s.
struct RankGroup {
  std::shared_ptr<Store> store;
  std::unique_ptr<Communicator> communicator;
  /// Why "auto" did not take NCCL for ranks on a device, and why not shared memory; on every rank
  /// the same. Empty if it did, or did not come to the question.
  std::string why_not_nccl, why_not_shared_memory;
  /// The processes, by rank.
  std::vector<Hello> ranks;
  std::shared_ptr<RankStatus> status;
  /// Tells the others that this rank lives, and aborts the communicator when the run has failed.
  /// Null for a group of one.
  std::unique_ptr<Heartbeat> heartbeat;
};

/// Joins the run that `environment` tells of: the store, the rendezvous, the connections.
/// @throws Unsupported or InvalidArgument for the backend (which must be the same on all ranks);
/// InvalidArgument if rank 0 would serve on an address that is not a loopback one without a token;
/// CommError with the culprits if not all ranks come: of one that finds no store rank 0, if that is
/// to serve it
RankGroup bootstrap(const LaunchEnvironment& environment, const BootstrapOptions& options);

}  // namespace tessera::comm
