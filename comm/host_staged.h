#pragma once

#include <memory>

#include "comm/communicator.h"
#include "core/base/context.h"

namespace tessera::comm {

/// Collectives on the memory of `context`'s device through a communicator of host memory.
///
/// The start_ functions wait for the device's work so far, copy the input to host memory (of an
/// all-gather this rank's part only), and start the inner collective there. wait() waits for it and
/// queues the copy back to the device (of an all-gather the others' parts only). Call both on the
/// context's thread. Host buffers go straight to `inner`, and errors come from it. A group of one
/// copies only for a reduce-scatter.
///
/// Staging is taken from the device backend's host_allocator() and booked as Communication of "host
/// staging" from the start to the end of wait(). Staging of a work that nobody waited for is
/// released by a later collective, or with the communicator.
///
/// @param context  of a CUDA device
/// @throws InvalidArgument for a context of the CPU
std::unique_ptr<Communicator> make_host_staged_communicator(std::unique_ptr<Communicator> inner,
                                                            std::shared_ptr<Context> context);

}  // namespace tessera::comm
