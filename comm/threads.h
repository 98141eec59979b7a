#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/queued_communicator.h"

namespace tessera::comm {

/// Runs the collectives of ranks that are threads of one process; their communicators share it.
/// Thread-safe. Compares calls before data moves, and names the culprit of every failure.
class ThreadGroup {
 public:
  /// @throws InvalidArgument if world_size < 1
  explicit ThreadGroup(int world_size);
  int world_size() const { return world_size_; }

  /// Waits for all ranks; the last one to arrive runs the collective for all.
  /// @throws CommError, the same on every rank: Timeout naming the missing ranks, PeerLost naming
  ///   the ranks that left, Mismatch naming the minority
  void run(int rank, const Collective& collective);

  /// Fails every rank that waits in run() or calls it later. The first failure stands.
  void fail(const CommError& error);
  /// `rank` leaves the group for good.
  void leave(int rank);

 private:
  void check_departed_locked(const Collective& collective);
  std::vector<int> missing_locked() const;
  void move_data_locked() const;
  void copy_to_others_locked(int rank, std::size_t offset, std::size_t bytes) const;

  const int world_size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<const Collective*> calls_;  // by rank; null: not arrived
  std::vector<bool> departed_;
  std::uint64_t round_ = 0;
  std::optional<CommError> failure_;
};

/// The communicator of one rank of the group. It may outlive the others.
/// @throws InvalidArgument if rank is out of range
std::unique_ptr<Communicator> make_threads_communicator(std::shared_ptr<ThreadGroup> group,
                                                        int rank,
                                                        const CommunicatorOptions& options = {});

}  // namespace tessera::comm
