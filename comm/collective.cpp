#include "comm/collective.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

namespace tessera::comm {
namespace {

// Omits the kind if the label repeats it: "all_gather h.3".
std::string with_label(std::string_view kind, std::uint64_t sequence, std::string_view label,
                       const Subgroup* group = nullptr) {
  if (label.starts_with(kind)) {
    label.remove_prefix(kind.size());
    label.remove_prefix(std::min(label.size(), label.find_first_not_of(' ')));
  }
  std::string details(label);
  if (group != nullptr) details += (details.empty() ? "" : ", ") + group->describe();
  return details.empty() ? fmt::format("{}#{}", kind, sequence)
                         : fmt::format("{}#{} ({})", kind, sequence, details);
}

}  // namespace

std::string_view collective_name(CollectiveKind kind) {
  static constexpr std::array<std::string_view, 5> kNames = {"all_gather", "reduce_scatter",
                                                             "all_reduce", "broadcast", "barrier"};
  const auto i = static_cast<std::size_t>(kind);
  return i < kNames.size() ? kNames[i] : "unknown collective";
}

std::string Collective::describe() const {
  return with_label(collective_name(kind), sequence, label, group.get());
}

Signature::Signature(const Collective& collective)
    : sequence(collective.sequence),
      count(collective.count),
      root(collective.kind == CollectiveKind::Broadcast
               ? world_rank(collective.group.get(), collective.root)
               : collective.root),
      kind(static_cast<std::uint8_t>(collective.kind)),
      dtype(static_cast<std::uint8_t>(collective.dtype)),
      op(static_cast<std::uint8_t>(collective.op)) {
  std::copy_n(collective.label.data(), std::min(collective.label.size(), label.size()),
              label.data());
}

std::string Signature::describe() const {
  const std::string_view text(label.data(), strnlen(label.data(), label.size()));
  const auto which = static_cast<CollectiveKind>(kind);
  std::string result = with_label(collective_name(which), sequence, text);
  if (which != CollectiveKind::Barrier) {
    result += fmt::format(" {}[{}]", static_cast<DType>(dtype), count);
  }
  if (which == CollectiveKind::AllReduce) {
    result += static_cast<ReduceOp>(op) == ReduceOp::Sum ? " sum" : " max";
  }
  if (which == CollectiveKind::Broadcast) result += fmt::format(" from rank {}", root);
  return result;
}

std::optional<CommError> find_mismatch(std::span<const Signature> by_rank, const Subgroup* group) {
  const auto agreeing = [&](const Signature& s) {
    return std::count(by_rank.begin(), by_rank.end(), s);
  };
  const Signature* reference = &by_rank[0];
  for (const Signature& s : by_rank) {
    if (agreeing(s) > agreeing(*reference)) reference = &s;
  }
  std::vector<int> odd;
  std::vector<std::string> calls;
  for (std::size_t r = 0; r < by_rank.size(); ++r) {
    if (by_rank[r] == *reference) continue;
    odd.push_back(world_rank(group, static_cast<int>(r)));
    calls.push_back(fmt::format("rank {} called {}", odd.back(), by_rank[r].describe()));
  }
  if (odd.empty()) return std::nullopt;
  return CommError(
      CommFailure::Mismatch, odd,
      "ranks disagree on collective #{}{}: {}, where {} of {} ranks called {}; every "
      "rank must run the same collectives in the same order",
      reference->sequence, group == nullptr ? std::string() : " of the " + group->describe(),
      fmt::join(calls, ", "), agreeing(*reference), by_rank.size(), reference->describe());
}

std::string rank_list(std::span<const int> ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

std::string format_seconds(std::chrono::milliseconds duration) {
  return fmt::format("{:g} s", static_cast<double>(duration.count()) / 1e3);
}

}  // namespace tessera::comm
