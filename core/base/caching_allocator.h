#pragma once

#include <map>
#include <mutex>

#include "core/base/memory.h"

namespace tessera {

/// An allocator that reuses freed blocks for requests of the same size class, so that a training
/// step makes no system calls after the first steps.
class CachingAllocator : public Allocator {
 public:
  CachingAllocator() = default;
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  void* allocate(std::size_t bytes) final;
  void deallocate(void* data, std::size_t bytes) noexcept final;
  std::size_t reserved_bytes() const final;
  /// Every derived destructor must call it, while give_back() still exists.
  void trim() noexcept final;

 protected:
  /// Size class of a request: at least `bytes`, not 0.
  virtual std::size_t block_bytes(std::size_t bytes) const = 0;
  /// Memory from the system; null when exhausted. @throws CudaError if the device is lost
  virtual void* take(std::size_t bytes) = 0;
  virtual void give_back(void* data) noexcept = 0;
  /// "host memory", "memory of cuda:0"
  virtual std::string name() const = 0;

 private:
  void* take_counted(std::size_t bytes);

  mutable std::mutex mutex_;
  std::multimap<std::size_t, void*> idle_;
  std::map<void*, std::size_t> in_use_;
  std::size_t reserved_ = 0;
};

}  // namespace tessera
