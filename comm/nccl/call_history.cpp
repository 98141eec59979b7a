#include "comm/nccl/call_history.h"

#include <utility>

namespace tessera::comm {
namespace {

// How far back what is expected may lie.
constexpr std::size_t kLookedAt = CallHistory::kKept / 2;
// Calls before a place that tell it from others.
constexpr std::size_t kSurroundings = 256;

}  // namespace

void CallHistory::add(std::string call) {
  const bool as_expected = next_ && calls_[*next_] == call;
  calls_.push_back(std::move(call));
  if (as_expected)
    ++*next_;
  else
    next_ = most_alike();
  if (calls_.size() <= kKept) return;
  calls_.pop_front();
  ++first_;
  if (next_) --*next_;  // not below 0: it follows at a distance of kLookedAt at most
}

const std::string* CallHistory::find(std::uint64_t number) const {
  return number < first_ || number >= size() ? nullptr : &calls_[number - first_];
}

// Of places that are equally like now, the earliest: what is followed from there on goes on longest
// before it comes to what happens now and then, an evaluation say, and comes to it in time.
std::optional<std::size_t> CallHistory::most_alike() const {
  const std::size_t now = calls_.size();
  std::optional<std::size_t> best;
  std::size_t longest = 0;
  for (std::size_t next = now > kLookedAt ? now - kLookedAt : 1;
       next < now && longest < kSurroundings; ++next) {
    std::size_t alike = 0;
    while (alike < next && alike < kSurroundings &&
           calls_[next - 1 - alike] == calls_[now - 1 - alike]) {
      ++alike;
    }
    if (alike <= longest) continue;
    longest = alike;
    best = next;
  }
  return best;
}

}  // namespace tessera::comm
