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
  /// "shm", "tcp" or "nccl". "auto": NCCL if each rank has its own GPU and can load NCCL; else
  /// shared memory if all ranks are on one host that supports it; else TCP. Shared memory and TCP
  /// stage device buffers through the host. A group of one uses none of them.
  ///
  /// NCCL does not support ranks that share a GPU, and bootstrap() refuses them. Tests on a single
  /// GPU set TESSERA_NCCL_SHARE_DEVICES=1, a distinct NCCL_HOSTID per process, and NCCL_NET=Socket
  /// NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo NCCL_PROTO=Simple NCCL_MAX_CTAS=1.
  std::string backend = "auto";
  /// Time limit for the rendezvous of all ranks and their connections.
  std::chrono::milliseconds init_timeout{60'000};
  /// Default deadline of collectives; context of their device buffers, whose memory ledger also
  /// counts staging buffers.
  CommunicatorOptions communicator = {};
  /// Build and configuration, which must be equal on all ranks; see Hello.
  std::string fingerprint = {};
  /// A rank, or the store's server, that is silent for this long fails the run. Zero: never.
  std::chrono::milliseconds heartbeat_timeout{4000};
  /// Called before the rendezvous with a nonzero id, unique to this start and equal on all ranks.
  /// Not called if the store is unreachable.
  std::function<void(std::uint64_t)> on_start_id = {};
  /// Source of the phase and step that heartbeats report; null: bootstrap() creates one.
  std::shared_ptr<RankStatus> status = {};
  /// Called with all ranks' processes after the rendezvous.
  std::function<void(const std::vector<Hello>&)> on_met = {};
  /// Called on another thread if this process still runs seconds after the run has failed.
  std::function<void(const CommError&, const std::vector<Hello>&)> on_stuck = {};
  /// Called with warnings about slow ranks, on a thread of the store's server.
  std::function<void(const std::string&)> on_note = {};
  /// Opens NCCL; tests replace it.
  NcclOpener open_nccl = [](Context& context) { return comm::open_nccl(context); };
};

/// A rank's connections to the others. Members are destroyed in reverse order: the heartbeat uses
/// the communicator, which uses the store. If this rank serves the store, the destructor waits up
/// to 2 s for the other ranks to disconnect.
struct RankGroup {
  std::shared_ptr<Store> store;
  std::unique_ptr<Communicator> communicator;
  /// Why "auto" rejected NCCL or shared memory, equal on all ranks; empty: chosen or not tried.
  std::string why_not_nccl, why_not_shared_memory;
  /// The processes, by rank.
  std::vector<Hello> ranks;
  std::shared_ptr<RankStatus> status;
  /// Sends this rank's heartbeats, and aborts the communicator when the run fails. Null for a group
  /// of one.
  std::unique_ptr<Heartbeat> heartbeat;
};

/// Joins a run: connects to the store, meets the other ranks there, and connects to them.
/// @throws Unsupported or InvalidArgument if the backend can't be used (equal on all ranks);
///   InvalidArgument if rank 0 would listen on a non-loopback address without a token; CommError
///   naming the missing ranks, or rank 0 if its store is unreachable
RankGroup bootstrap(const LaunchEnvironment& environment, const BootstrapOptions& options);

}  // namespace tessera::comm
