#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/queued_communicator.h"

namespace tessera::comm {

/// Synchronizes the ranks of one process; shared by their communicators. Compares the ranks' calls
/// before data moves, and names the culprit of every failure. Thread-safe.
class ThreadGroup {
 public:
  /// @throws InvalidArgument if world_size < 1
  explicit ThreadGroup(int world_size);
  int world_size() const { return world_size_; }

  /// First meeting of a collective: returns when every rank has arrived with an equal signature.
  /// @throws CommError, the same on every rank: Timeout naming the missing ranks, PeerLost naming
  ///   the ranks that left, Mismatch naming the minority
  void arrive(int rank, const Collective& collective);
  /// Later meetings of the same collective. No deadline: ranks read each other's buffers until all
  /// have arrived.
  void meet();
  /// The call of `rank`; valid between arrive() and the collective's last meet().
  const Collective& collective(int rank) const {
    return *collectives_[static_cast<std::size_t>(rank)];
  }

  /// Fails every rank that waits in arrive() or arrives later. The first failure stands.
  void fail(const CommError& error);
  /// `rank` leaves the group for good.
  void leave(int rank);

 private:
  void check_departed_locked(const Collective& collective);
  std::vector<int> missing_locked() const;

  const int world_size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<const Collective*> collectives_;  // of the current collective, null: not arrived
  std::vector<bool> arrived_, departed_;
  int arrivals_ = 0, met_ = 0;
  std::uint64_t round_ = 0, meeting_ = 0;
  std::optional<CommError> failure_;
};

/// The communicator of one rank of the group. It may outlive the others.
/// @throws InvalidArgument if rank is out of range
std::unique_ptr<Communicator> make_threads_communicator(std::shared_ptr<ThreadGroup> group,
                                                        int rank,
                                                        const CommunicatorOptions& options = {});

}  // namespace tessera::comm
