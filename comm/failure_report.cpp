#include "comm/failure_report.h"

#include <utility>

#include "comm/control/agreement.h"

namespace tessera::comm {
namespace {

// Time for the monitor to report how a process ended. It needs 1 s on a loaded machine, 1.5 s
// without a launcher.
constexpr std::chrono::milliseconds kWatcher{2000};
// Delay before a rank that misses several peers reports them: another may know the one culprit.
constexpr std::chrono::milliseconds kSettle{500};

}  // namespace

FailureReport::FailureReport(std::shared_ptr<Store> store, std::string key, int world_size,
                             std::vector<std::string> processes, SubgroupPtr group)
    : store_(std::move(store)),
      key_(std::move(key)),
      world_size_(world_size),
      processes_(std::move(processes)),
      group_(std::move(group)) {}

CommError FailureReport::lost(const Collective& collective, std::span<const int> ranks) const {
  return CommError(CommFailure::PeerLost, world(ranks), "{}: lost {}, which ended or was killed",
                   collective.describe(), name(ranks));
}

CommError FailureReport::missing(const Collective& collective, std::span<const int> ranks) const {
  return CommError(CommFailure::Timeout, world(ranks),
                   "{}: {} of {} ranks arrived within {}, missing: {}", collective.describe(),
                   world_size_ - static_cast<int>(ranks.size()), world_size_,
                   format_seconds(collective.deadline), name(ranks));
}

CommError FailureReport::stuck(const Collective& collective, std::span<const int> ranks,
                               std::string_view question) const {
  return CommError(
      CommFailure::Timeout, world(ranks),
      "{}: all ranks arrived, but the data to or from {} did not get through within {}; {}",
      collective.describe(), name(ranks), format_seconds(collective.deadline), question);
}

CommError FailureReport::verdict(const CommError& error) noexcept {
  if (verdict_) return *verdict_;
  try {
    if (key_ == kVerdict && error.failure() == CommFailure::PeerLost) {
      verdict_ = find_verdict(*store_, kWatcher, key_);
    } else if (error.failure() == CommFailure::Timeout && error.culprits().size() > 1) {
      verdict_ = find_verdict(*store_, kSettle, key_);
    }
    if (verdict_) return *verdict_;
    verdict_ = decode_error(set_or_get(*store_, key_, encode_error(error)));
  } catch (const std::exception&) {
    // The store is unreachable. An interruption names the cause better than this rank's own error.
    const std::lock_guard lock(mutex_);
    verdict_ = interruption_ ? *interruption_ : error;
  }
  return *verdict_;
}

void FailureReport::set_interruption(const CommError& reason) {
  const std::lock_guard lock(mutex_);
  if (!interruption_) interruption_ = reason;
}

CommError FailureReport::interruption() const {
  const std::lock_guard lock(mutex_);
  require<InternalError>(interruption_.has_value(), "a wait was interrupted without a reason");
  return *interruption_;
}

std::string FailureReport::name(std::span<const int> ranks) const {
  if (ranks.empty()) return "a rank";
  std::string text;
  for (const int r : world(ranks)) {
    const auto at = static_cast<std::size_t>(r);
    text += text.empty() ? "" : ", ";
    text += "rank " + std::to_string(r);
    if (at < processes_.size()) text += " (" + processes_[at] + ")";
  }
  return text;
}

}  // namespace tessera::comm
