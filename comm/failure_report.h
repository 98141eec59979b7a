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

/// CommError::fate() of ranks that live, but that others do not reach.
inline constexpr std::string_view kCutOff = "cut off";

/// Errors of collectives between processes: the same words for every backend, and one verdict for
/// all ranks.
class FailureReport {
 public:
  /// @param key        of the verdict in the store; new for each communicator. kVerdict: it ends
  /// the
  ///                   run, and who watches processes may know better why a rank is lost
  /// @param processes  how messages call each rank's process, by rank; may be empty
  FailureReport(std::shared_ptr<Store> store, std::string key, int world_size,
                std::vector<std::string> processes);

  /// "rank 2 (host, pid 12)"
  std::string name(std::span<const int> ranks) const;
  CommError lost(const Collective& collective, std::span<const int> ranks) const;
  /// Some ranks did not come to the collective in time.
  CommError missing(const Collective& collective, std::span<const int> ranks) const;
  /// All came, but not all data. @param question  possible cause: "is it stopped?"
  CommError stuck(const Collective& collective, std::span<const int> ranks,
                  std::string_view question) const;

  /// The error that all ranks report: that of the rank that failed first. A rank leaves only after
  /// this call, so that no peer blames it for leaving. One thread at a time.
  CommError verdict(const CommError& error) noexcept;

  /// Why another thread interrupted the collective: the first reason stands. Any thread.
  void set_interruption(const CommError& reason);
  CommError interruption() const;

 private:
  std::optional<CommError> wait_for_verdict(std::chrono::milliseconds at_most);

  const std::shared_ptr<Store> store_;
  const std::string key_;
  const int world_size_;
  const std::vector<std::string> processes_;
  std::optional<CommError> verdict_;
  mutable std::mutex mutex_;
  std::optional<CommError> interruption_;
};

}  // namespace tessera::comm
