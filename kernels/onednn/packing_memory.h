#pragma once

#include <array>
#include <atomic>
#include <cstddef>

namespace tessera::kernels::onednn {

/// Buffers of 2 MiB and twice, four times, ... as much, which are kept to be used again, and never
/// unmapped. Of each size there are as many as were in use at once, or one more where threads met in
/// their search. Without locks, so that a forked child can't wait
/// for a thread that it doesn't have.
class PackingBuffers {
 public:
  static constexpr std::size_t kLeast = std::size_t{2} << 20;  ///< bytes, and their alignment

  /// @return null if memory or the table is exhausted
  void* take(std::size_t bytes) noexcept;
  /// @return false if `data` is none of these buffers
  bool give_back(const void* data) noexcept;

 private:
  struct Buffer {
    std::atomic<bool> in_use = false;
    std::atomic<void*> data = nullptr;  // set once, before `bytes`
    std::atomic<std::size_t> bytes = 0;
  };

  std::array<Buffer, 1024> buffers_;
};

}  // namespace tessera::kernels::onednn
