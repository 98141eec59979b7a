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
  /// "shm", "tcp" or "nccl". "auto": NCCL if each rank computes on a GPU of its own and all can
  /// load it; else shared memory if all ranks are on one host and can share some; else TCP. Shared
  /// memory and TCP stage a device's buffers through the host. A group of one uses none of them.
  ///
  /// NCCL refuses ranks of one host that share a GPU, and so do we, in words. For tests on a single
  /// GPU, TESSERA_NCCL_SHARE_DEVICES=1 in the environment lets them through; then each process also
  /// needs an NCCL_HOSTID of its own, and NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo
  /// NCCL_PROTO=Simple NCCL_MAX_CTAS=1.
  std::string backend = "auto";
  /// Until all ranks have met and connected.
  std::chrono::milliseconds init_timeout{60'000};
  /// Default deadline of a collective, and the context: the communicator takes buffers of its
  /// device, and books staging in its ledger.
  CommunicatorOptions communicator = {};
  /// Configuration that must be equal on all ranks; see Hello.
  std::string fingerprint = {};
  /// Silence after which a rank, or the process that serves the store, ends the run. Zero: never.
  std::chrono::milliseconds heartbeat_timeout{4000};
  /// Called, before the ranks wait for each other, with a number unique to this start and equal on
  /// all its ranks; never 0. Not called if the store can't be reached.
  std::function<void(std::uint64_t)> on_start_id = {};
  /// Phase and step of this process, for heartbeats; null: made here. Not used after the group.
  std::shared_ptr<RankStatus> status = {};
  /// Called with the processes, by rank, once all have met.
  std::function<void(const std::vector<Hello>&)> on_met = {};
  /// Called on another thread if this process still runs seconds after the run has failed.
  std::function<void(const CommError&, const std::vector<Hello>&)> on_stuck = {};
  /// Called on another thread of the process that serves the store, with notes on slow ranks.
  std::function<void(const std::string&)> on_note = {};
  /// How NCCL is opened.
  NcclOpener open_nccl = [](Context& context) { return comm::open_nccl(context); };
};

/// A rank's connections to the others. Members are destroyed in reverse order: the heartbeat uses
/// the communicator, which uses the store. The rank that serves the store waits up to 2 s there for
/// the others to leave.
struct RankGroup {
  std::shared_ptr<Store> store;
  std::unique_ptr<Communicator> communicator;
  /// Why "auto" did not take NCCL, or shared memory, equal on all ranks; empty if it took it or did
  /// not try.
  std::string why_not_nccl, why_not_shared_memory;
  /// The processes, by rank.
  std::vector<Hello> ranks;
  std::shared_ptr<RankStatus> status;
  /// Sends this rank's heartbeats, and aborts the communicator once the run has failed. Null for a
  /// group of one.
  std::unique_ptr<Heartbeat> heartbeat;
};

/// Joins a run: store, rendezvous, connections.
/// @throws Unsupported or InvalidArgument for the backend (equal on all ranks); InvalidArgument if
/// rank 0 would serve without a token on an address that is not a loopback one; CommError with the
/// culprits if not all ranks come (rank 0 if it is to serve the store and none is found)
RankGroup bootstrap(const LaunchEnvironment& environment, const BootstrapOptions& options);

}  // namespace tessera::comm
