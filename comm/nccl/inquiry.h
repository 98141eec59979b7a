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

/// For the verdict of all ranks to come, once they have told where they are.
inline constexpr std::chrono::milliseconds kNcclVerdictTime{5000};

/// How ranks find out over the store which of them holds NCCL up: who is suspicious raises an
/// alarm, all tell where they are, and one verdict counts for all. Belongs to one thread, but for
/// name().
class NcclInquiry {
 public:
  /// @param comparison  peers may be waiting for its answers; it must outlive this
  /// @param position    of this rank, when it is asked for
  NcclInquiry(std::shared_ptr<Store> store, int rank, int world_size, const NcclOptions& options,
              CallComparison& comparison, std::function<NcclPosition()> position);

  /// What the store keeps of this communicator under that name.
  std::string key(std::string_view what) const;
  std::string name(std::span<const int> ranks) const { return report_.name(ranks); }

  /// Answers peers. @return the verdict, if one has raised an alarm; waits for it
  std::optional<CommError> ask_peers();
  /// Raises the alarm, and finds the verdict within answer_time and what the store needs.
  CommError investigate(const NcclSuspicion& suspicion);
  /// So that peers that ask learn of it.
  void publish(const CommError& error);

 private:
  CommError await_verdict(const std::string& who);
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
