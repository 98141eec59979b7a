#include "comm/subgroup.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace tessera::comm {
namespace {

constexpr std::size_t kRanksShown = 8;

// A copy that shares no memory: copies of an exception share their text, and the thread sanitizer
// does not see how the standard library counts its owners.
CommError separate(const CommError& error) {
  CommError copy(error.failure(), error.culprits(), "{}", error.what());
  return copy.set_fate(error.fate());
}

}  // namespace

std::string short_rank_list(std::span<const int> ranks) {
  const auto shown = ranks.first(std::min(ranks.size(), kRanksShown));
  const std::size_t more = ranks.size() - shown.size();
  return fmt::format("{} {}{}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(shown, ", "),
                     more > 0 ? fmt::format(" and {} more", more) : "");
}

std::string Subgroup::describe() const {
  return fmt::format("{} group of {}", kind, short_rank_list(ranks));
}

std::uint64_t Subgroup::id() const {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash == 0 ? 1 : hash;
}

int world_rank(const Subgroup* group, int rank) {
  return group == nullptr ? rank : group->ranks.at(static_cast<std::size_t>(rank));
}

std::vector<int> world_ranks(const Subgroup* group, std::span<const int> ranks) {
  std::vector<int> result;
  for (const int rank : ranks) result.push_back(world_rank(group, rank));
  return result;
}

void FailureDomain::add(Member& member) {
  const std::lock_guard lock(mutex_);
  members_.push_back(&member);
  if (failure_) member.fail_alone(separate(*failure_));
}

void FailureDomain::remove(Member& member) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase(members_, &member);
}

void FailureDomain::fail(const CommError& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = separate(reason);
  for (Member* member : members_) member->fail_alone(separate(*failure_));
}

void FailureDomain::check() const {
  const std::lock_guard lock(mutex_);
  for (Member* member : members_) member->check_alone();
}

std::string FailureDomain::under_way() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> texts;
  for (const Member* member : members_) {
    if (std::string text = member->under_way_alone(); !text.empty())
      texts.push_back(std::move(text));
  }
  return fmt::format("{}", fmt::join(texts, " and "));
}

void FailureDomain::set_recorder(std::shared_ptr<FlightRecorder> recorder) {
  const std::lock_guard lock(recorder_mutex_);
  recorder_ = std::move(recorder);
}

std::shared_ptr<FlightRecorder> FailureDomain::recorder() const {
  const std::lock_guard lock(recorder_mutex_);
  return recorder_;
}

}  // namespace tessera::comm
