// Each float32 product of oneDNN takes a buffer of a few MiB, into which it packs an operand, and
// frees it. In malloc's heap small allocations settle in the hole, the next buffer lies elsewhere,
// and the heap grows by tens of MiB over the first steps. This plugin's posix_memalign() and free()
// keep such buffers. product_library.cpp loads the plugin in a way that oneDNN calls them.

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#define TESSERA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kKept = std::size_t{256} << 10;  // smaller ones are malloc's

/// Buffers of whole huge pages; idle ones are used again, if possible by the same thread. There are
/// never more than were in use at once.
class Buffers {
 public:
  /// @return null if memory is exhausted
  void* take(std::size_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    Buffer* best = nullptr;
    for (Buffer& buffer : buffers_)
      if (!buffer.in_use && buffer.bytes >= bytes &&
          (best == nullptr || (buffer.thread == this_thread() && best->thread != this_thread())))
        best = &buffer;
    if (best == nullptr) best = add((bytes + kHugePage - 1) / kHugePage * kHugePage);
    if (best == nullptr) return nullptr;
    best->in_use = true;
    best->thread = this_thread();
    return best->data;
  }
  /// @return false if `data` is not of these buffers
  bool give_back(const void* data) noexcept {
    if (reinterpret_cast<std::uintptr_t>(data) % kHugePage != 0) return false;
    const std::lock_guard lock(mutex_);
    for (Buffer& buffer : buffers_)
      if (buffer.data == data) {
        buffer.in_use = false;
        return true;
      }
    return false;
  }

 private:
  struct Buffer {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    bool in_use = false;
    const void* thread = nullptr;  ///< its last user
  };

  static const void* this_thread() {
    thread_local char mark = 0;
    return &mark;
  }

  /// A new buffer; in place of an idle one, which was too small.
  Buffer* add(std::size_t bytes) {
    auto* const all = static_cast<std::byte*>(::mmap(
        nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (all == MAP_FAILED) return nullptr;
    const std::size_t before = -reinterpret_cast<std::uintptr_t>(all) % kHugePage;
    if (before > 0) ::munmap(all, before);
    ::munmap(all + before + bytes, kHugePage - before);
    ::madvise(all + before, bytes, MADV_HUGEPAGE);
    for (Buffer& buffer : buffers_)
      if (!buffer.in_use) {
        ::munmap(buffer.data, buffer.bytes);
        buffer = {.data = all + before, .bytes = bytes};
        return &buffer;
      }
    return &buffers_.emplace_back(Buffer{.data = all + before, .bytes = bytes});
  }

  std::mutex mutex_;
  std::vector<Buffer> buffers_;
};

Buffers& buffers() {
  static auto* const all = new Buffers;  // oneDNN frees memory until the process has ended
  return *all;
}

template <typename F>
F next(const char* name) {
  return reinterpret_cast<F>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

TESSERA_EXPORT int posix_memalign(void** data, std::size_t alignment, std::size_t bytes) noexcept {
  static auto* const otherwise = next<decltype(&posix_memalign)>("posix_memalign");
  const bool keeps = bytes >= kKept && bytes <= SIZE_MAX / 2 && alignment <= kHugePage;
  void* const kept = keeps ? buffers().take(bytes) : nullptr;
  if (kept == nullptr) return otherwise(data, alignment, bytes);
  *data = kept;
  return 0;
}

TESSERA_EXPORT void free(void* data) noexcept {
  static auto* const otherwise = next<decltype(&free)>("free");
  if (!buffers().give_back(data)) otherwise(data);
}
