#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/base/memory.h"

namespace tessera {

/// The memory of captured work: its blocks keep their addresses for as long as this lives, so that
/// the work may run again.
class CapturedMemory {
 public:
  virtual ~CapturedMemory() = default;
  /// Taken from the allocator for it, beside what captures within whose memory it was made took.
  virtual std::size_t bytes() const = 0;
};

/// An allocator whose device may capture work instead of running it.
///
/// Blocks asked for during a capture are cut from memory that belongs to the capture, and are
/// reused within it and the captures that share its memory alone. A block from before that is freed
/// meanwhile stays until the capture's end, as captured work may read it. A block of the capture
/// that outlives it stays valid, and is no one else's as long as it does. The memory becomes free
/// when all its blocks and every CapturedMemory that shares it are gone.
class CaptureAllocator final : public Allocator {
 public:
  /// @param memory  where all memory comes from
  explicit CaptureAllocator(std::unique_ptr<Allocator> memory);
  ~CaptureAllocator() override;
  CaptureAllocator(const CaptureAllocator&) = delete;
  CaptureAllocator& operator=(const CaptureAllocator&) = delete;

  void* allocate(std::size_t bytes) override;
  void deallocate(void* data, std::size_t bytes) noexcept override;
  std::size_t reserved_bytes() const override { return memory_->reserved_bytes(); }
  void trim() noexcept override { memory_->trim(); }

  /// @param within  of this allocator: the capture takes what is free there before it takes more.
  ///   Work captured so must never run at the same time as that other work. Null: memory of its own
  /// @throws InternalError if a capture is under way
  void begin_capture(const CapturedMemory* within = nullptr);
  /// Must be destroyed before the allocator.
  std::unique_ptr<CapturedMemory> end_capture();

 private:
  class Arena;
  class Captured;
  struct Freed {
    void* data;
    std::size_t bytes;
  };
  void drop(Arena* arena) noexcept;

  std::unique_ptr<Allocator> memory_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Arena>> arenas_;  // of captures that still own memory
  Arena* capturing_ = nullptr;
  std::size_t bytes_before_ = 0;  // of the arena, when the capture began
  std::vector<Freed> freed_later_;
};

}  // namespace tessera
