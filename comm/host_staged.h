#pragma once

#include <memory>

#include "comm/communicator.h"
#include "core/base/context.h"

namespace tessera::comm {

/// Collectives on the memory of `context`'s device through a communicator of host memory.
///
/// The start_ functions wait for the device's work so far, copy what the others need from this rank
/// to host memory (of an all-gather its own part only), and start the inner collective there.
/// wait() returns when the inner one is done, and has queued the copy back on the device (of an
/// all-gather the others' parts only). Both belong to the context's thread. Buffers on the host go
/// straight to `inner`, and so does every error: labels, deadlines and culprits are its own. In a
/// group of one, buffers that need not change are not copied.
///
/// The staging comes from the device backend's host_allocator(), booked as Communication of "host
/// staging" from the start to the end of wait(): the ledger's peak is what collectives under way
/// held together. The allocator keeps the blocks, so that taking them again costs nothing. Staging
/// of a work that nobody waited for is given back by a later collective, or with the communicator.
///
/// @param context  of a device beside the CPU
/// @throws InvalidArgument if the context computes on host memory anyway
std::unique_ptr<Communicator> make_host_staged_communicator(std::unique_ptr<Communicator> inner,
                                                            std::shared_ptr<Context> context);

}  // namespace tessera::comm
