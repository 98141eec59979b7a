#include "comm/nccl/call_history.h"

#include <utility>

namespace tessera::comm {

void CallHistory::add(std::string call) {
  const std::string two = calls_.empty() ? call : calls_.back() + call;
  const std::string* const predicted = expected();
  if (predicted != nullptr && *predicted == call) {
    ++next_;
  } else {
    auto before = last_.find(two);
    if (before == last_.end()) before = last_.find(call);
    next_ = before == last_.end() ? size() + 1 : before->second + 1;
  }
  if (last_.size() > kKept) last_.clear();
  last_[two] = last_[call] = size();
  calls_.push_back(std::move(call));
  if (calls_.size() <= kKept) return;
  calls_.pop_front();
  ++first_;
}

const std::string* CallHistory::find(std::uint64_t number) const {
  return number < first_ || number >= size() ? nullptr : &calls_[number - first_];
}

}  // namespace tessera::comm
