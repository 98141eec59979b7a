#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/collective.h"
#include "comm/control/store.h"

namespace tessera::comm {

/// Errors of collectives across processes, with the same messages in all backends. The verdict is
/// the error that all ranks agree to report.
class FailureReport {
 public:
  /// @param key        store key of the verdict, unique per communicator. With kVerdict, the
  ///   verdict ends the run, and the monitor's diagnosis of a lost rank takes precedence
  /// @param processes  name of each world rank's process in messages, by rank; may be empty
  /// @param group      the ranks below are this group's; errors name ranks of the world
  FailureReport(std::shared_ptr<Store> store, std::string key, int world_size,
                std::vector<std::string> processes, SubgroupPtr group = {});

  /// "rank 2 (host, pid 12)"
  std::string name(std::span<const int> ranks) const;
  const Subgroup* group() const { return group_.get(); }
  std::vector<int> world(std::span<const int> ranks) const {
    return world_ranks(group_.get(), ranks);
  }
  CommError lost(const Collective& collective, std::span<const int> ranks) const;
  /// `ranks` did not arrive in time.
  CommError missing(const Collective& collective, std::span<const int> ranks) const;
  /// All ranks arrived, but not all data. @param question  possible cause: "is it stopped?"
  CommError stuck(const Collective& collective, std::span<const int> ranks,
                  std::string_view question) const;

  /// Publishes `error` as the verdict unless another rank was first; returns the verdict. Call it
  /// before leaving the group, so that no peer blames this rank for leaving. One thread at a time.
  CommError verdict(const CommError& error) noexcept;

  /// Reason for an interruption by another thread; the first one stands. Any thread.
  void set_interruption(const CommError& reason);
  CommError interruption() const;

 private:
  const std::shared_ptr<Store> store_;
  const std::string key_;
  const int world_size_;
  const std::vector<std::string> processes_;
  const SubgroupPtr group_;
  std::optional<CommError> verdict_;
  mutable std::mutex mutex_;
  std::optional<CommError> interruption_;
};

}  // namespace tessera::comm
