#pragma once

#include <memory>
#include <string>

#include "comm/control/store.h"
#include "comm/queued_communicator.h"
#include "comm/shared_segment.h"

namespace tessera::comm {

struct SharedMemoryOptions : ConnectOptions {
  SharedMemoryOptions() { name = "shm"; }
  /// Size of a chunk; each rank has two. Equal on all ranks.
  std::size_t chunk_bytes = 128 * 1024;
};

/// Bytes of the segment.
std::size_t shared_memory_bytes(int world_size, const SharedMemoryOptions& options);
/// The part of a segment of `bytes` that a rank's memory ledger counts.
std::size_t shared_memory_share(std::size_t bytes, int rank, int world_size);

/// Rank 0 creates a segment, all others map it. Called by all ranks, which succeed or fail
/// together.
/// @throws Unsupported naming the rank that can't map it, and why; CommError if a rank does not
///   arrive in time
SharedSegment connect_shared_segment(Store& store, int rank, int world_size,
                                     const SharedMemoryOptions& options);

/// Communicator over shared memory, for processes or threads of one host.
///
/// Ranks exchange signatures together with the first chunk. No buffer is written before all
/// signatures agree, so a mismatch throws CommError(Mismatch) on every rank. Waiting ranks spin
/// briefly, then sleep on a futex. A killed rank is detected by its released lock on the segment.
/// All ranks report the same error, as with make_tcp_communicator(). A rank's share of the segment
/// counts as Communication in the ledger of options.communicator.context, if set.
///
/// @param store    outlives the communicator; carries the error that all ranks report
/// @param segment  from connect_shared_segment()
std::unique_ptr<Communicator> make_shared_memory_communicator(const std::shared_ptr<Store>& store,
                                                              int rank, int world_size,
                                                              SharedSegment segment,
                                                              const SharedMemoryOptions& options);

/// Why ranks on this host can't share memory; empty if a test within this process succeeds.
std::string shared_memory_problem();

}  // namespace tessera::comm
