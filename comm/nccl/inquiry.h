#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/failure_report.h"
#include "comm/nccl.h"
#include "comm/nccl/call_comparison.h"
#include "comm/nccl/position.h"

namespace tessera::comm {

/// Time to agree on a verdict once all ranks have published their positions.
inline constexpr std::chrono::milliseconds kNcclVerdictTime{5000};

/// Finds the rank that blocks NCCL. A rank with a suspicion raises an alarm in the store, all ranks
/// publish their positions there, and all report the same error, the verdict. Used by one thread,
/// except name().
class NcclInquiry {
 public:
  /// @param comparison  answers peers in ask_peers(); outlives this
  /// @param position    returns this rank's position
  NcclInquiry(std::shared_ptr<Store> store, int rank, int world_size, const NcclOptions& options,
              CallComparison& comparison, std::function<NcclPosition()> position);

  std::string key(std::string_view what) const;
  std::string name(std::span<const int> ranks) const { return report_.name(ranks); }

  /// Answers requests of peers. If there is an alarm, waits for the verdict and returns it.
  std::optional<CommError> ask_peers();
  /// Raises the alarm and finds the verdict, within answer_time plus the store's answer times.
  CommError investigate(const NcclSuspicion& suspicion);
  /// Publishes `error` as the verdict, unless there is one, and raises the alarm.
  void publish(const CommError& error);

 private:
  CommError await_verdict(const std::string& who);
  void raise_alarm();
  void publish_position();

  const std::shared_ptr<Store> store_;
  const int rank_, world_size_;
  const NcclOptions& options_;
  CallComparison& comparison_;
  const std::function<NcclPosition()> position_;
  const std::string verdict_key_;
  FailureReport report_;
  bool store_is_lost_ = false;
};

}  // namespace tessera::comm
