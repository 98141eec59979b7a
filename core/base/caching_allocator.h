#pragma once

#include <map>
#include <mutex>

#include "core/base/memory.h"

namespace tessera {

/// An allocator that keeps freed blocks for requests of nearly their size, so that a training step
/// asks the system for nothing once it is warm.
class CachingAllocator : public Allocator {
 public:
  CachingAllocator() = default;
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  void* allocate(std::size_t bytes) final;
  void deallocate(void* data, std::size_t bytes) noexcept final;
  std::size_t reserved_bytes() const final;
  void trim() noexcept final;
  /// What may be held from the system at most, in bytes, from now on; 0: no limit. What is held
  /// already stays.
  void set_limit(std::size_t bytes);

 protected:
  /// What a request for `bytes` takes, so that blocks fit again. At least `bytes`, not 0.
  virtual std::size_t block_bytes(std::size_t bytes) const = 0;
  /// Memory of the system; null if there is none left. @throws CudaError if the device is lost
  virtual void* take(std::size_t bytes) = 0;
  virtual void give_back(void* data) noexcept = 0;
  /// "host memory", "memory of cuda:0"
  virtual std::string name() const = 0;
  /// To be called by every destructor: give_back() is gone afterwards.
  void release_idle() noexcept;

 private:
  void* take_within_limit(std::size_t bytes);

  mutable std::mutex mutex_;
  std::multimap<std::size_t, void*> idle_;
  std::map<void*, std::size_t> in_use_;
  std::size_t reserved_ = 0;
  std::size_t limit_ = 0;
};

/// Lets the host's memory run out at `bytes` held: a request beyond that throws OutOfMemory once
/// nothing idle is left to give back. 0: no limit.
/// @throws Unsupported if the allocator is not one of the host's memory
void limit_memory(Allocator& allocator, std::size_t bytes);

}  // namespace tessera
