#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "core/base/context.h"

namespace tessera::comm {

/// Host memory for staging collectives, booked in the context's ledger. A CUDA context allocates it
/// from its backend's host_allocator(). Created and destroyed on any thread.
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
  std::size_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<Context> context_;
  Allocator& allocator_;
  MemoryLedger::Entry& entry_;
  const std::size_t bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace tessera::comm
