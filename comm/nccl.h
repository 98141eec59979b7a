#pragma once

#include <functional>
#include <memory>
#include <string>

#include "comm/control/store.h"
#include "comm/nccl/driver.h"
#include "comm/queued_communicator.h"
#include "core/base/error.h"

namespace tessera::comm {

/// Last resort after a communication failure: prints the error and exits at once with code 4.
/// Buffered output is lost.
[[noreturn]] void leave_process(const CommError& error);

/// communicator.context must be on a CUDA device.
struct NcclOptions : ConnectOptions {
  NcclOptions() { name = "nccl"; }
  /// Periods of polling the device for progress, and the store for failures of peers.
  std::chrono::milliseconds poll{50}, store_poll{250};
  /// Time for peers to publish their positions when a collective is late.
  std::chrono::milliseconds answer_time{2'000};
  /// Time for NCCL to abort, and for the caller's thread to notice the failure afterwards.
  std::chrono::milliseconds abort_time{10'000}, grace{10'000};
  /// Called on the watchdog's thread if abort_time or grace passes, because NCCL does not abort or
  /// the caller is stuck in a CUDA call.
  std::function<void(const CommError&)> on_stuck = leave_process;
};

/// Loads the plugin and opens NCCL on the context's device, with its own stream.
///
/// @param plugin  path of the shared library; empty: TESSERA_NCCL_PLUGIN of the environment, else
///   libtessera_nccl.so in the program's directory or in ../lib/tessera
/// @throws Unsupported naming what is missing (plugin, NCCL, driver, device)
std::unique_ptr<NcclDriver> open_nccl(Context& context, const std::string& plugin = {});

/// Communicator for device memory over NCCL. All ranks call this, and succeed or fail together.
///
/// Collectives run in order on their own stream, each after the compute stream's work queued before
/// its start_. For device buffers Work::wait() makes the compute stream wait, not the host. Host
/// buffers are staged through the device; wait() blocks for them and for barriers.
///
/// NCCL chooses the order of sums, so that the last bits may differ from other backends, but not
/// between ranks or runs of the same shape. A reduce-scatter of bf16 adds in bf16: it rounds at every
/// hop. Unsupported: maximum of floating point, which would drop NaN.
///
/// A group (see Communicator::begin_group) is one launch, after the compute stream's work queued
/// before end_group(), and counts as one collective below.
///
/// Deadlines count from the moment the device reaches the collective, since the host runs ahead. A
/// watchdog enforces them and polls NCCL for errors. After a failure the ranks exchange their
/// positions over the store. The culprit is the rank that does not answer, has not called the
/// collective, called another one, or has not reached it on its device; all ranks report the same
/// error, the verdict.
///
/// Signatures are compared before data moves, over the store, and only for launches that differ
/// from the predicted one: see comm/nccl/call_comparison.h. After a mismatch all ranks throw within
/// about 1 s.
///
/// Subgroups open NCCL again, each with its own stream and unique id. Start the collectives of
/// overlapping groups in an order that all their ranks share: an unpredicted launch waits for the
/// other ranks, and NCCL's kernels wait on the device.
///
/// A failure aborts the communicator and invalidates later results on the device: call check()
/// before using them. If the abort does not unblock the caller, NcclOptions::on_stuck is called.
///
/// @param store  outlives the communicator; carries NCCL's unique id, verdicts, positions and
///   signatures; unpredicted launches need it
/// @throws CommError naming the missing ranks, or the rank on which NCCL does not start, and why
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<NcclDriver> driver,
                                                     std::shared_ptr<Store> store, int rank,
                                                     int world_size, const NcclOptions& options);

}  // namespace tessera::comm
