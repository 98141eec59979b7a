#include "comm/nccl/position.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

namespace tessera::comm {

static_assert(std::is_trivially_copyable_v<NcclPosition>);

std::string NcclPosition::encode() const {
  return {reinterpret_cast<const char*>(this), sizeof(NcclPosition)};
}

std::optional<NcclPosition> NcclPosition::decode(std::string_view text) {
  if (text.size() != sizeof(NcclPosition)) return std::nullopt;
  NcclPosition position;
  std::memcpy(static_cast<void*>(&position), text.data(), text.size());
  return position;
}

CommError judge(const NcclSuspicion& suspicion, int rank,
                std::span<const std::optional<NcclPosition>> by_rank, const FailureReport& report,
                std::chrono::milliseconds answer_time) {
  const Collective& mine = suspicion.collective;
  const int self = world_rank(report.group(), rank);
  const auto ranks_where = [&](auto&& condition) {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < by_rank.size(); ++r) {
      if (condition(by_rank[r])) ranks.push_back(static_cast<int>(r));
    }
    return ranks;
  };
  const auto silent = ranks_where([](const auto& p) { return !p.has_value(); });

  if (!suspicion.late) {
    if (suspicion.remote && !silent.empty()) return report.lost(mine, silent);
    return CommError(suspicion.remote ? CommFailure::PeerLost : CommFailure::Aborted,
                     suspicion.remote ? std::vector<int>{} : std::vector<int>{self},
                     "{}: rank {}: {}", mine.describe(), self, suspicion.text);
  }
  if (!silent.empty()) {
    return CommError(CommFailure::Timeout, report.world(silent),
                     "{}: not done within {}, and {} did not answer within {} more: stopped, or "
                     "gone",
                     mine.describe(), format_seconds(mine.deadline), report.name(silent),
                     format_seconds(answer_time));
  }
  const auto absent = ranks_where([&](const auto& p) { return p->called <= mine.sequence; });
  if (!absent.empty()) return report.missing(mine, absent);

  const auto is_in = [&](const auto& p) {
    return p->unfinished != 0 && p->oldest.sequence == mine.sequence;
  };
  if (std::all_of(by_rank.begin(), by_rank.end(), is_in)) {
    std::vector<Signature> signatures;
    for (const auto& p : by_rank) signatures.push_back(p->oldest);
    if (const auto mismatch = find_mismatch(signatures, report.group())) return *mismatch;
  }
  const auto behind = ranks_where([&](const auto& p) {
    return p->unfinished != 0 &&
           (p->oldest.sequence < mine.sequence || (is_in(p) && p->has_started == 0));
  });
  if (!behind.empty()) {
    return CommError(CommFailure::Timeout, report.world(behind),
                     "{}: {} called it, but the work before it on the device was not done within "
                     "{}",
                     mine.describe(), report.name(behind), format_seconds(mine.deadline));
  }
  return report.stuck(mine, {}, "is the network down? NCCL_DEBUG=INFO says more");
}

}  // namespace tessera::comm
