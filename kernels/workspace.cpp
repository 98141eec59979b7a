#include "kernels/workspace.h"

#include "core/base/storage.h"

namespace tessera::kernels {

Workspace::Workspace(Context& context, std::size_t bytes, const char* owner)
    : memory_(
          Storage::allocate(context.shared_from_this(), bytes, MemoryCategory::Workspace, owner)),
      data_(memory_->data()) {}

Workspace::~Workspace() = default;

bool Workspace::is_planned() const { return memory_->context()->device().type == DeviceType::Meta; }

}  // namespace tessera::kernels
