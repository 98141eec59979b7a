#include "core/base/caching_allocator.h"

#include "core/base/error.h"
#include "core/base/memory.h"

namespace tessera {
namespace {

// Beyond any address space, yet small enough that rounding up does not overflow.
constexpr std::size_t kMostBytes = std::size_t{1} << 56;

}  // namespace

void* CachingAllocator::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  require<OutOfMemory>(bytes <= kMostBytes, "{} bytes requested, more than any machine has", bytes);
  const std::size_t wanted = block_bytes(bytes);
  {
    const std::lock_guard lock(mutex_);
    const auto found = idle_.lower_bound(wanted);
    if (found != idle_.end() && found->first <= wanted + wanted / 4) {
      void* data = found->second;
      in_use_[data] = found->first;
      idle_.erase(found);
      return data;
    }
  }
  void* data = take_counted(wanted);
  if (data == nullptr) {  // retry without idle blocks
    trim();
    data = take_counted(wanted);
  }
  const std::lock_guard lock(mutex_);
  const auto text = [](std::size_t n) { return format_bytes(static_cast<std::int64_t>(n)); };
  require<OutOfMemory>(data != nullptr, "{} is exhausted: {} requested, {} held", name(),
                       text(wanted), text(reserved_));
  in_use_[data] = wanted;
  return data;
}

// Null if the system is out of memory.
void* CachingAllocator::take_counted(std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    reserved_ += bytes;  // reserve first, so that other threads see it
  }
  const auto give_room_back = [&] {
    const std::lock_guard lock(mutex_);
    reserved_ -= bytes;
  };
  try {
    void* const data = take(bytes);
    if (data == nullptr) give_room_back();
    return data;
  } catch (...) {
    give_room_back();
    throw;
  }
}

void CachingAllocator::deallocate(void* data, std::size_t) noexcept {
  if (data == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto found = in_use_.find(data);
  if (found == in_use_.end()) return;
  idle_.emplace(found->second, data);
  in_use_.erase(found);
}

std::size_t CachingAllocator::reserved_bytes() const {
  const std::lock_guard lock(mutex_);
  return reserved_;
}

void CachingAllocator::trim() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [bytes, data] : idle_) {
    reserved_ -= bytes;
    give_back(data);
  }
  idle_.clear();
}

}  // namespace tessera
