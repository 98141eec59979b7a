#include "comm/nccl/pending.h"

#include <algorithm>

namespace tessera::comm {

void PendingCollectives::push(std::shared_ptr<NcclItem> item) {
  const std::lock_guard lock(mutex_);
  items_.push_back(std::move(item));
}

std::shared_ptr<NcclItem> PendingCollectives::oldest() const {
  const std::lock_guard lock(mutex_);
  return items_.empty() ? nullptr : items_.front();
}

bool PendingCollectives::all_waited() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(items_.begin(), items_.end(),
                     [](const auto& item) { return item->waited.load(); });
}

std::shared_ptr<NcclItem> PendingCollectives::advance(NcclItem::Time now) {
  while (const auto item = oldest()) {
    if (item->done->is_done()) {
      const std::lock_guard lock(mutex_);
      items_.pop_front();
      continue;
    }
    if (!item->started && item->start->is_done()) {
      item->started = now;
      item->has_started = true;
    }
    const bool late = item->started && now - *item->started >= item->collective.deadline;
    return late ? item : nullptr;
  }
  return nullptr;
}

}  // namespace tessera::comm
