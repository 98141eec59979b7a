#include "comm/control/waiting_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

namespace tessera::comm {
namespace {

// For a value that is known to be there.
constexpr std::chrono::milliseconds kRead{1000};

// As text: one character a rank, so any world's fits and none needs parsing.
std::string encode(const std::vector<int>& ranks, int world_size) {
  std::string text(static_cast<std::size_t>(world_size), '-');
  for (const int rank : ranks) text.at(static_cast<std::size_t>(rank)) = 'w';
  return text;
}

std::vector<int> decode(const std::string& text) {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == 'w') ranks.push_back(static_cast<int>(i));
  }
  return ranks;
}

bool waits_for(const Waits& waits, int rank, int other) {
  const auto found = waits.find(rank);
  return found != waits.end() &&
         std::find(found->second.begin(), found->second.end(), other) != found->second.end();
}

}  // namespace

std::vector<int> find_cut(const Waits& waits) {
  std::set<std::pair<int, int>> pairs;
  std::set<int> involved;
  for (const auto& [rank, owing] : waits) {
    for (const int other : owing) {
      if (rank >= other || !waits_for(waits, other, rank)) continue;
      pairs.insert({rank, other});
      involved.insert({rank, other});
    }
  }
  if (pairs.size() > 1) {
    for (const int rank : involved) {
      const bool in_all = std::all_of(pairs.begin(), pairs.end(), [&](const auto& pair) {
        return pair.first == rank || pair.second == rank;
      });
      if (in_all) return {rank};
    }
  }
  return {involved.begin(), involved.end()};
}

WaitCause find_wait_cause(int rank, const std::vector<int>& owing,
                          const std::function<std::optional<std::vector<int>>(int)>& waits_of) {
  Waits waits = {{rank, owing}};
  std::set<int> silent;
  std::vector<int> ahead = owing;
  while (!ahead.empty()) {
    const int next = ahead.back();
    ahead.pop_back();
    if (waits.contains(next) || silent.contains(next)) continue;
    const auto found = waits_of(next);
    if (!found || found->empty()) {
      silent.insert(next);
      continue;
    }
    waits[next] = *found;
    ahead.insert(ahead.end(), found->begin(), found->end());
  }
  WaitCause cause;
  cause.silent.assign(silent.begin(), silent.end());
  if (silent.empty()) cause.apart = find_cut(waits);
  return cause;
}

WaitingRanks::WaitingRanks(std::shared_ptr<Store> store, std::string name, int rank, int world_size)
    : store_(std::move(store)), name_(std::move(name)), rank_(rank), world_size_(world_size) {}

std::string WaitingRanks::key(std::uint64_t sequence, int rank) const {
  return fmt::format("{}/waiting/{}/{}", name_, sequence, rank);
}

void WaitingRanks::tell(std::uint64_t sequence, const std::vector<int>& owing) {
  if (sequence != told_) times_ = 0;
  told_ = sequence;
  store_->set(fmt::format("{}/{}", key(sequence, rank_), times_++), encode(owing, world_size_));
}

void WaitingRanks::tell_over(std::uint64_t sequence) {
  store_->set(key(sequence, rank_) + "/over", "1");
}

std::optional<std::vector<int>> WaitingRanks::of(int rank, std::uint64_t sequence) {
  for (const std::uint64_t at : {sequence + 1, sequence, sequence - 1}) {
    const std::string notes = key(at, rank);
    if (!store_->has(notes + "/0") || store_->has(notes + "/over")) continue;
    int last = 0;
    while (store_->has(fmt::format("{}/{}", notes, last + 1))) ++last;
    return decode(store_->get(fmt::format("{}/{}", notes, last), kRead));
  }
  return std::nullopt;
}

}  // namespace tessera::comm
