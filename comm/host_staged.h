#pragma once

#include <memory>

#include "comm/communicator.h"
#include "core/base/context.h"

namespace tessera::comm {

/// Collectives on device memory through a communicator of host memory.
///
/// start_ waits for the device, copies the input to the host (all_gather: this rank's part only)
/// and starts the inner collective. wait() waits for it and queues the copy back to the device
/// (all_gather: the other parts only). Call both on the context's thread. Host buffers pass through
/// to `inner`, and errors come from it. A group of one copies only for reduce_scatter.
///
/// Staging comes from the backend's host_allocator() and is booked as Communication, "host
/// staging", until wait() returns. Staging of a work dropped without wait() is released by a later
/// collective or with the communicator.
///
/// @throws InvalidArgument if `context` is not on a CUDA device
std::unique_ptr<Communicator> make_host_staged_communicator(std::unique_ptr<Communicator> inner,
                                                            std::shared_ptr<Context> context);

}  // namespace tessera::comm
