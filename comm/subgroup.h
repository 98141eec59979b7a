#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/error.h"

namespace tessera::comm {

class FlightRecorder;

/// Members of a communicator made by Communicator::split(). Equal on all members.
struct Subgroup {
  std::string kind;  ///< "shard"
  /// Ranks of the world, ascending. The world is the outermost communicator.
  std::vector<int> ranks;
  /// Identifies the group among all groups of the run; prefix of its keys in a store.
  std::string key = {};

  /// "shard group of ranks 2, 3"; at most 8 ranks are listed.
  std::string describe() const;
  /// Hash of `key`, never 0.
  std::uint64_t id() const;
};
/// Null: the world.
using SubgroupPtr = std::shared_ptr<const Subgroup>;

/// World rank of a group's rank.
int world_rank(const Subgroup* group, int rank);
std::vector<int> world_ranks(const Subgroup* group, std::span<const int> ranks);

/// "ranks 0, 2, 4 and 61 more"
std::string short_rank_list(std::span<const int> ranks);

/// Communicators of one rank that fail together and share a flight recorder: the outermost one and
/// all its subgroups. Thread-safe.
class FailureDomain {
 public:
  class Member {  // NOLINT(cppcoreguidelines-virtual-class-destructor): derived ones are public
   public:
    /// Fails this communicator alone. Must not call the domain. Any thread; idempotent.
    virtual void fail_alone(const CommError& reason) noexcept = 0;
    /// Throws if this communicator has failed.
    virtual void check_alone() {}
    /// Communicator::under_way() without subgroups.
    virtual std::string under_way_alone() const { return {}; }

   protected:
    virtual ~Member() = default;
  };

  /// A member that joins after a failure fails at once.
  void add(Member& member);
  /// No call of the member is running after this returns.
  void remove(Member& member) noexcept;

  /// Fails all members; the first reason stands.
  void fail(const CommError& reason) noexcept;
  void check() const;
  /// Collectives under way in all members: "all_reduce#3 (loss) and all_gather#8 (h.1, ...)".
  std::string under_way() const;

  void set_recorder(std::shared_ptr<FlightRecorder> recorder);
  std::shared_ptr<FlightRecorder> recorder() const;

  /// Time that Work::wait() blocked the host, over all members.
  std::atomic<std::int64_t> waited_ns{0};
  /// The caller has received the failure from a member.
  std::atomic<bool> is_noticed{false};

 private:
  mutable std::mutex mutex_;
  std::vector<Member*> members_;  // the outermost communicator first
  std::optional<CommError> failure_;
  mutable std::mutex recorder_mutex_;
  std::shared_ptr<FlightRecorder> recorder_;
};

/// A communicator's place in its family. Default: a new outermost communicator.
struct Membership {
  SubgroupPtr group = {};
  std::shared_ptr<FailureDomain> domain = std::make_shared<FailureDomain>();
};

}  // namespace tessera::comm
