#include "comm/host_memory.h"

#include "core/base/error.h"

namespace tessera::comm {
namespace {

Allocator& host_allocator(Context& context) {
  return context.device().type == DeviceType::CUDA ? context.backend().host_allocator()
                                                   : context.allocator();
}

}  // namespace

HostMemory::HostMemory(std::shared_ptr<Context> context, std::size_t bytes, std::string_view owner,
                       MemoryCategory category)
    : context_(std::move(context)),
      allocator_(host_allocator(*context_)),
      entry_(context_->ledger().entry(category, owner)),
      bytes_(bytes) {
  try {
    data_ = static_cast<std::byte*>(allocator_.allocate(bytes));
  } catch (const OutOfMemory& error) {
    throw OutOfMemory("{} for {} ({})\n{}", error.what(), entry_.owner,
                      memory_category_name(entry_.category), context_->ledger().table());
  }
  context_->ledger().book(entry_, static_cast<std::int64_t>(bytes_));
}

HostMemory::~HostMemory() {
  allocator_.deallocate(data_, bytes_);
  context_->ledger().book(entry_, -static_cast<std::int64_t>(bytes_));
}

}  // namespace tessera::comm
