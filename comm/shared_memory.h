#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/control/store.h"
#include "comm/queued_communicator.h"
#include "comm/shared_segment.h"

namespace tessera::comm {

struct SharedMemoryOptions {
  CommunicatorOptions communicator = {};
  /// Time for all ranks to map the segment.
  std::chrono::milliseconds connect_timeout{60'000};
  /// Prefix of the keys in the store; new for each communicator.
  std::string name = "shm";
  /// How messages call each rank's process ("host, pid 12"), by rank; may be empty.
  std::vector<std::string> processes = {};
  /// Bytes that a rank hands over at a time, of which it keeps two; equal on all ranks.
  std::size_t chunk_bytes = 128 * 1024;
};

/// What a segment for so many ranks holds at least.
std::size_t shared_memory_bytes(int world_size, const SharedMemoryOptions& options);

/// Rank 0 makes a segment, all others map it. Called by all ranks; all end with it, or all with the
/// same error.
/// @throws Unsupported naming the rank that can't, and why; CommError if not all ranks come in time
SharedSegment connect_shared_segment(Store& store, int rank, int world_size,
                                     const SharedMemoryOptions& options);

/// Ranks that are processes of one host, or threads, through memory that they share.
///
/// A collective's first meeting carries what each rank calls and its first chunk of data, and no
/// buffer is written before all have compared the calls of all; so a mismatch ends in
/// CommError(Mismatch) on every rank, and what fits into a chunk takes one meeting. Ranks meet by
/// counters in the segment: a short look, then a futex, so that a rank that waits leaves its core
/// to one that computes. A rank that is killed is noticed by its lock on the segment. Failures are
/// told as with make_gloo_communicator(): one verdict for all. A rank's share of
/// the segment is booked as Communication if options.communicator.context is set.
///
/// @param store    outlives the communicator; carries verdicts
/// @param segment  from connect_shared_segment()
std::unique_ptr<Communicator> make_shared_memory_communicator(std::shared_ptr<Store> store,
                                                              int rank, int world_size,
                                                              SharedSegment segment,
                                                              const SharedMemoryOptions& options);

/// Why ranks of this machine can't share memory; empty if they can, as far as one process can tell.
std::string shared_memory_problem();

}  // namespace tessera::comm
