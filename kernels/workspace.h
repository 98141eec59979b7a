#pragma once

#include <cstddef>
#include <memory>

namespace tessera {
class Context;
class Storage;
}  // namespace tessera

namespace tessera::kernels {

/// Scratch memory of one kernel call, booked as Workspace in the context's ledger until it is
/// destroyed. Defined out of line: files compiled once per CPU level must not share inline code.
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
  /// True on the meta device: the memory is booked, and there is nothing to compute.
  bool is_planned() const;

 private:
  std::shared_ptr<Storage> memory_;
  void* data_;
};

}  // namespace tessera::kernels
