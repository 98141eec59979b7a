#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/control/store.h"
#include "comm/nccl/driver.h"
#include "comm/queued_communicator.h"
#include "core/base/error.h"

namespace tessera::comm {

/// Last resort of a rank whose communication has failed: prints the error and ends the process at
/// once with exit code 4. Buffered output is lost.
[[noreturn]] void leave_process(const CommError& error);

struct NcclOptions {
  /// `context` is required, on a CUDA device.
  CommunicatorOptions communicator = {};
  /// Time for all ranks to connect.
  std::chrono::milliseconds connect_timeout{60'000};
  /// Prefix of the keys in the store; new for each communicator.
  std::string name = "nccl";
  /// Names of the ranks' processes in messages ("host, pid 12"), by rank; may be empty.
  std::vector<std::string> processes = {};

  /// Periods of polling the device for progress, and the store for failures of peers.
  std::chrono::milliseconds poll{50}, store_poll{250};
  /// Time for peers to publish their positions when a collective is late.
  std::chrono::milliseconds answer_time{2'000};
  /// Time for NCCL to abort, and for the caller's thread to notice the failure afterwards.
  std::chrono::milliseconds abort_time{10'000}, grace{10'000};
  /// Called on the watchdog's thread if one of these times passes: NCCL does not abort, or the
  /// caller is stuck in a CUDA call or does not look.
  std::function<void(const CommError&)> on_stuck = leave_process;
};

/// Loads the plugin and opens NCCL on the context's device, with its own stream.
///
/// @param plugin  path of the shared library; empty: the file that the environment's
///   TESSERA_NCCL_PLUGIN names, else libtessera_nccl.so beside the program or in ../lib/tessera
/// @throws Unsupported naming what is missing (plugin, NCCL, driver, device)
std::unique_ptr<NcclDriver> open_nccl(Context& context, const std::string& plugin = {});

/// Collectives of device memory over NCCL. Called by all ranks; all return it, or throw.
///
/// Collectives run on their own stream, in order, each behind the compute stream's work at its
/// start_. Work::wait() makes the compute stream wait, not the host, for device buffers; host
/// buffers are staged through the device, and wait() blocks for them and for barriers.
///
/// Sums are in NCCL's order: the last bits may differ from other backends, but not between ranks or
/// runs of the same shape. Unsupported: reduce-scatter of bf16, which would round at every hop, and
/// maximum of floating point, which would drop NaN.
///
/// A group of collectives (see Communicator::begin_group) is one launch, behind the compute
/// stream's work at its end, and counts as one collective below.
///
/// A deadline counts from when the device has reached the collective, since the host runs ahead. A
/// watchdog looks after deadlines and NCCL's errors; then ranks exchange their positions over the
/// store. The culprit is the rank that does not answer, has not called the collective, called
/// another one, or has not reached it on its device; all ranks report the same verdict.
///
/// Signatures are compared before data moves, as with other backends, but over the store, and only
/// where a launch is not the predicted one: see comm/nccl/call_comparison.h. After a mismatch all
/// ranks throw within about a second.
///
/// After a failure the communicator is aborted and later results of the device are worthless: call
/// check() before they leave the device. If the abort does not free the caller, see
/// NcclOptions::on_stuck.
///
/// @param store  outlives the communicator; carries NCCL's unique id, verdicts, positions and
///   signatures; without it nothing new can be launched
/// @throws CommError naming the ranks that are missing, or where NCCL does not start and why
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<NcclDriver> driver,
                                                     std::shared_ptr<Store> store, int rank,
                                                     int world_size, const NcclOptions& options);

}  // namespace tessera::comm
