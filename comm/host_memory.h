#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "core/base/context.h"

namespace tessera::comm {

/// A block of host memory, for the staging of collectives above all, whatever device the context
/// computes on: of a device's context from its backend's host_allocator(). May be made and
/// destroyed on any thread.
class HostMemory {
 public:
  /// @param bytes  0: data() is null
  /// @throws OutOfMemory naming the owner, with the ledger
  HostMemory(std::shared_ptr<Context> context, std::size_t bytes, std::string_view owner,
             MemoryCategory category = MemoryCategory::Communication);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  std::byte* data() const { return data_; }

 private:
  const std::shared_ptr<Context> context_;
  Allocator& allocator_;
  MemoryLedger::Entry& entry_;
  const std::size_t bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace tessera::comm
