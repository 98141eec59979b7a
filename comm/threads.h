#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
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
  const SubgroupPtr& group() const { return group_; }
  /// The group that the members share; the first call makes it.
  std::shared_ptr<ThreadGroup> subgroup(const SubgroupPtr& group);

  /// Waits for all ranks; the last one to arrive runs the collective for all.
  /// @throws CommError, the same on every rank: Timeout naming the missing ranks, PeerLost naming
  ///   the ranks that left, Mismatch naming the minority
  void run(int rank, const Collective& collective);

  /// Fails every rank that waits in run() or calls it later, in all groups of the family. The first
  /// failure stands.
  void fail(const CommError& error);
  /// `rank` leaves the group for good.
  void leave(int rank);

 private:
  /// State of a group and all its subgroups.
  struct Family {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<CommError> failure;
    std::map<std::string, std::weak_ptr<ThreadGroup>> groups;  // by key
  };
  ThreadGroup(std::shared_ptr<Family> family, SubgroupPtr group);

  void check_departed_locked(const Collective& collective);
  std::vector<int> missing_locked() const;
  void move_data_locked() const;
  void copy_to_others_locked(int rank, std::size_t offset, std::size_t bytes) const;

  const std::shared_ptr<Family> family_ = std::make_shared<Family>();
  const SubgroupPtr group_;
  const int world_size_;
  // Guarded by the family's mutex.
  std::vector<const Collective*> calls_;  // by rank; null: not arrived
  std::vector<bool> departed_;
  std::uint64_t round_ = 0;
};

/// The communicator of one rank of the group. It may outlive the others.
/// @throws InvalidArgument if rank is out of range
std::unique_ptr<Communicator> make_threads_communicator(std::shared_ptr<ThreadGroup> group,
                                                        int rank,
                                                        const CommunicatorOptions& options = {});

}  // namespace tessera::comm
