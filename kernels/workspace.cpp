#include "kernels/workspace.h"

#include "core/base/storage.h"

namespace tessera::kernels {

struct Workspace::Memory {
  std::shared_ptr<Storage> storage;
};

Workspace::Workspace(Context& context, std::size_t bytes, const char* owner)
    : memory_(new Memory{
          Storage::allocate(context.shared_from_this(), bytes, MemoryCategory::Workspace, owner)}),
      data_(memory_->storage->data()) {}

Workspace::~Workspace() { delete memory_; }

}  // namespace tessera::kernels
