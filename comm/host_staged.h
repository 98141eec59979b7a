#pragma once

#include <cstddef>
#include <memory>

#include "comm/communicator.h"
#include "core/base/context.h"

namespace tessera::comm {

struct Collective;

/// Bytes of staging of a collective on device memory.
std::size_t host_staging_bytes(const Collective& collective, int world_size);

/// Collectives on device memory through a communicator for host memory.
///
/// start_ waits for the device, copies the input to the host (all_gather: this rank's part only)
/// and starts the inner collective. wait() waits for that one and queues the copy to the device
/// (all_gather: the other parts only). Call both on the context's thread. Host buffers pass through
/// to `inner`. A group of one copies only for reduce_scatter.
///
/// Staging buffers come from the backend's host_allocator() and count as Communication, "host
/// staging", until wait() returns. A later collective, or the communicator's destructor, releases
/// the buffers of works that were dropped without wait().
///
/// @throws InvalidArgument if `context` is not on a CUDA device
std::unique_ptr<Communicator> make_host_staged_communicator(std::unique_ptr<Communicator> inner,
                                                            std::shared_ptr<Context> context);

}  // namespace tessera::comm
