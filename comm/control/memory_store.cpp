#include "comm/control/memory_store.h"

#include "comm/collective.h"

namespace tessera::comm {

void MemoryStore::set(const std::string& key, std::string_view value) {
  const std::lock_guard lock(mutex_);
  require(values_.set(key, value),
          "store key '{}' already has another value; keys are written once", key);
  changed_.notify_all();
}

std::string MemoryStore::get(const std::string& key, std::chrono::milliseconds deadline) {
  std::unique_lock lock(mutex_);
  const std::string* found = nullptr;
  const bool in_time = changed_.wait_for(lock, deadline, [&] {
    found = values_.find(key);
    return found != nullptr;
  });
  if (!in_time) {
    throw CommError(CommFailure::Timeout, {}, "store key '{}' was not set within {}", key,
                    format_seconds(deadline));
  }
  return *found;
}

bool MemoryStore::has(const std::string& key) {
  const std::lock_guard lock(mutex_);
  return values_.find(key) != nullptr;
}

void MemoryStore::leave(const std::string& name, int readers) {
  const std::lock_guard lock(mutex_);
  values_.leave(name, readers);
}

std::size_t MemoryStore::size() const {
  const std::lock_guard lock(mutex_);
  return values_.size();
}

}  // namespace tessera::comm
