#pragma once

#include <cstddef>
#include <memory>

#include "core/base/context.h"

namespace tessera {
class Storage;
}

namespace tessera::kernels {

/// Scratch memory of one kernel call, booked as Workspace in the context's ledger and given back at
/// the end of the scope. Out of line, so that files compiled per CPU level share no code by it.
class Workspace {
 public:
  /// @param owner  name of the kernel in the ledger
  /// @throws OutOfMemory
  Workspace(Context& context, std::size_t bytes, const char* owner);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  /// Aligned to 64 bytes, contents undefined; null on the meta device.
  void* data() const { return data_; }

 private:
  std::shared_ptr<Storage> storage_;
  void* data_;
};

}  // namespace tessera::kernels
