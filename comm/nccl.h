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

/// The last resort of a rank whose communication has failed: says why, in the words of the
/// program's errors, and ends the process at once with exit code 4. Buffered output is lost: who
/// holds it may be what is stuck.
[[noreturn]] void leave_process(const CommError& error);

struct NcclOptions {
  /// `context` is needed, and of a CUDA device.
  CommunicatorOptions communicator = {};
  /// Time for all ranks to come and connect.
  std::chrono::milliseconds connect_timeout{60'000};
  /// Prefix of the keys in the store; new for each communicator.
  std::string name = "nccl";
  /// How messages call each rank's process ("host, pid 12"), by rank; may be empty.
  std::vector<std::string> processes = {};

  /// How often the device is asked what is done, and the store whether a peer has failed.
  std::chrono::milliseconds poll{50}, store_poll{250};
  /// Time for peers to say where they are when a collective is late.
  std::chrono::milliseconds answer_time{2'000};
  /// Time for NCCL to abort; and for the caller's thread to notice the failure afterwards.
  std::chrono::milliseconds abort_time{10'000}, grace{10'000};
  /// Called on the watchdog's thread if one of these times passes: NCCL does not let go, or the
  /// caller is stuck in a CUDA call, or busy with something else for so long.
  std::function<void(const CommError&)> on_stuck = leave_process;
};

/// Loads the plugin and opens NCCL on the context's device, with a stream of its own.
///
/// @param plugin  path of the shared library; empty: the file that the environment's
///   TESSERA_NCCL_PLUGIN names, else libtessera_nccl.so beside the program or in ../lib/tessera
/// @throws Unsupported naming what is missing (plugin, NCCL, driver, device)
std::unique_ptr<NcclDriver> open_nccl(Context& context, const std::string& plugin = {});

/// Collectives of device memory over NCCL. Called by all ranks; all end with it, or with an error.
///
/// Collectives are queued on a stream of their own, in order, each behind the compute stream's work
/// at its start_; Work::wait() of device buffers makes the compute stream wait, not the host.
/// Buffers on the host are staged through the device, and wait() waits for them; so does a
/// barrier's.
///
/// Sums are NCCL's: in an order of its own, so the last bits may differ from other backends',
/// though not between ranks or runs of the same shape. A reduce-scatter of bf16 would round at
/// every hop, and a maximum of floating point drop NaN: both are Unsupported.
///
/// Collectives of a group (see Communicator::begin_group) go to NCCL together, behind the compute
/// stream's work at its end, and are one collective to what follows.
///
/// A collective's deadline counts from when the device has reached it, since the host runs ahead. A
/// watchdog looks after deadlines and NCCL's errors. When one comes, the ranks tell each other
/// through the store where they are: who does not answer, has not called the collective, calls
/// another one, or has not reached it on its device, is the culprit, and all ranks report the same
/// verdict.
///
/// What ranks call is compared before data moves, as with the other backends, but without a message
/// for each collective: what differs from what all expect is compared through the store before it
/// is launched, and waits for all ranks until its deadline; what is expected, as in every step but
/// the first ones, is launched at once. See comm/nccl/call_comparison.h. After a mismatch nothing
/// that was launched beyond it ends, and all ranks throw within a second or so.
///
/// After a failure the communicator is aborted, so that what the device computes from then on is
/// worthless: check() before it leaves the device for good. If that does not free the caller, see
/// NcclOptions::on_stuck.
///
/// @param store  outlives the communicator; carries NCCL's unique id, verdicts, positions, and
///   what is compared; once it is lost, nothing new can be launched
/// @throws CommError naming who is missing, or where NCCL does not start and why
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<NcclDriver> driver,
                                                     std::shared_ptr<Store> store, int rank,
                                                     int world_size, const NcclOptions& options);

}  // namespace tessera::comm
