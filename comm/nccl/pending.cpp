#include "comm/nccl/pending.h"

#include <algorithm>

#include "comm/flight_recorder.h"

namespace tessera::comm {

void PendingCollectives::push(std::shared_ptr<NcclLaunch> launch) {
  const std::lock_guard lock(mutex_);
  launches_.push_back(std::move(launch));
}

std::shared_ptr<NcclLaunch> PendingCollectives::oldest() const {
  const std::lock_guard lock(mutex_);
  return launches_.empty() ? nullptr : launches_.front();
}

bool PendingCollectives::all_waited() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(launches_.begin(), launches_.end(), [](const auto& launch) {
    return std::all_of(launch->items.begin(), launch->items.end(),
                       [](const auto& item) { return item->waited.load(); });
  });
}

void PendingCollectives::record_failure() {
  const std::lock_guard lock(mutex_);
  for (const auto& launch : launches_) {
    if (launch->recorder) launch->recorder->ended(launch->entry, false);
  }
}

std::shared_ptr<NcclLaunch> PendingCollectives::advance(NcclLaunch::Time now) {
  while (const auto launch = oldest()) {
    if (launch->done->is_done()) {
      if (launch->recorder) launch->recorder->ended(launch->entry, true);
      const std::lock_guard lock(mutex_);
      launches_.pop_front();
      continue;
    }
    if (!launch->started && launch->start->is_done()) {
      launch->started = now;
      launch->has_started = true;
      if (launch->recorder) launch->recorder->started(launch->entry);
    }
    const bool late = launch->started && now - *launch->started >= launch->collective.deadline;
    return late ? launch : nullptr;
  }
  return nullptr;
}

}  // namespace tessera::comm
