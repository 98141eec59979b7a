#include "core/base/caching_allocator.h"

#include "core/base/error.h"

namespace tessera {
namespace {

// More than any address space holds, and far enough from 2^64 that rounding up cannot wrap.
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
  void* data = take(wanted);
  if (data == nullptr) {  // what is kept for reuse may be what is missing
    trim();
    data = take(wanted);
  }
  require<OutOfMemory>(data != nullptr, "{} is exhausted: {} requested, {} held", name(),
                       format_bytes(static_cast<std::int64_t>(wanted)),
                       format_bytes(static_cast<std::int64_t>(reserved_bytes())));
  const std::lock_guard lock(mutex_);
  in_use_[data] = wanted;
  reserved_ += wanted;
  return data;
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

void CachingAllocator::trim() noexcept { release_idle(); }

void CachingAllocator::release_idle() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [bytes, data] : idle_) {
    reserved_ -= bytes;
    give_back(data);
  }
  idle_.clear();
}

}  // namespace tessera
