#include "comm/control/memory_store.h"

#include "comm/collective.h"

namespace tessera::comm {

void MemoryStore::set(const std::string& key, std::string_view value) {
  const std::lock_guard lock(mutex_);
  const auto [entry, added] = values_.try_emplace(key, value);
  require(added || entry->second == value,
          "store key '{}' is taken by another value; keys are written once", key);
  changed_.notify_all();
}

std::string MemoryStore::get(const std::string& key, std::chrono::milliseconds deadline) {
  std::unique_lock lock(mutex_);
  auto found = values_.end();
  const bool in_time = changed_.wait_for(lock, deadline, [&] {
    found = values_.find(key);
    return found != values_.end();
  });
  if (!in_time) {
    throw CommError(CommFailure::Timeout, {}, "store key '{}' was not set within {}", key,
                    format_seconds(deadline));
  }
  return found->second;
}

bool MemoryStore::has(const std::string& key) {
  const std::lock_guard lock(mutex_);
  return values_.contains(key);
}

}  // namespace tessera::comm
