#include "kernels/onednn/packing_memory.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>
#include <string_view>

// Each float32 product of oneDNN takes a buffer of 1 to 3 MB, into which it packs an operand, and
// frees it. In malloc's heap small allocations settle in the hole, the next buffer lies elsewhere,
// and the heap grows by tens of MiB over the first steps. So oneDNN's calls of posix_memalign() and
// free() are redirected to functions that keep such buffers. It calls neither realloc() nor
// malloc_usable_size(), which would need the same.

namespace tessera::kernels::onednn {
namespace {

/// @return null when memory is exhausted
void* map(std::size_t bytes) {
  constexpr std::size_t kAlignment = PackingBuffers::kLeast;
  void* const all = ::mmap(nullptr, bytes + kAlignment, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  auto* const first = static_cast<std::byte*>(all);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(first) % kAlignment;
  if (before > 0) ::munmap(first, before);
  ::munmap(first + before + bytes, kAlignment - before);
  ::madvise(first + before, bytes, MADV_HUGEPAGE);
  return first + before;
}

}  // namespace

void* PackingBuffers::take(std::size_t bytes) noexcept {
  thread_local std::size_t last = 0;  // what this thread used before lies in its caches
  const std::size_t size = std::bit_ceil(std::max(bytes, kLeast));
  for (std::size_t i = 0; i <= buffers_.size(); ++i) {
    const std::size_t index = i == 0 ? last : i - 1;
    Buffer& buffer = buffers_[index];
    const std::size_t seen = buffer.bytes;
    if ((seen != 0 && seen != size) || buffer.in_use.exchange(true)) continue;
    if (buffer.bytes == 0) {
      void* const data = map(size);
      if (data != nullptr) {
        buffer.data = data;
        buffer.bytes = size;
      } else {
        buffer.in_use = false;
        return nullptr;
      }
    }
    if (buffer.bytes == size) {
      last = index;
      return buffer.data;
    }
    buffer.in_use = false;  // another thread has just made it, in another size
  }
  return nullptr;
}

bool PackingBuffers::give_back(const void* data) noexcept {
  if (data == nullptr || reinterpret_cast<std::uintptr_t>(data) % kLeast != 0) return false;
  for (Buffer& buffer : buffers_) {
    const void* const own = buffer.data;
    if (own != data) continue;
    buffer.in_use = false;
    return true;
  }
  return false;
}

namespace {

// Never destroyed: oneDNN frees memory until the process has ended.
constinit PackingBuffers buffers;

using Memalign = int (*)(void**, std::size_t, std::size_t);
using Free = void (*)(void*);
Memalign memalign_before = nullptr;
Free free_before = nullptr;

int kept_memalign(void** data, std::size_t alignment, std::size_t bytes) {
  constexpr std::size_t kKept = std::size_t{256} << 10;  // smaller ones are malloc's
  const bool keeps = bytes >= kKept && bytes <= SIZE_MAX / 4 && std::has_single_bit(alignment) &&
                     alignment <= PackingBuffers::kLeast;
  void* const kept = keeps ? buffers.take(bytes) : nullptr;
  if (kept == nullptr) return memalign_before(data, alignment, bytes);
  *data = kept;
  return 0;
}

void kept_free(void* data) {
  if (!buffers.give_back(data)) free_before(data);
}

#if defined(__x86_64__)
constexpr unsigned kCall = R_X86_64_JUMP_SLOT, kAddress = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr unsigned kCall = R_AARCH64_JUMP_SLOT, kAddress = R_AARCH64_GLOB_DAT;
#else
constexpr unsigned kCall = ~0U, kAddress = ~0U;  // nothing is redirected
#endif

/// A loaded library, with its tables for the dynamic linker.
class Library {
 public:
  explicit Library(const dl_phdr_info& info) : info_(info) {
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      if (info.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
      for (const auto* d = at<const ElfW(Dyn)>(info.dlpi_phdr[i].p_vaddr); d->d_tag != DT_NULL;
           ++d) {
        std::uintptr_t address = d->d_un.d_ptr;
        if (address < info.dlpi_addr) address += info.dlpi_addr;  // as musl leaves it
        if (d->d_tag == DT_SYMTAB) symbols_ = std::bit_cast<const ElfW(Sym)*>(address);
        if (d->d_tag == DT_STRTAB) names_ = std::bit_cast<const char*>(address);
        if (d->d_tag == DT_RELA) data_.first = std::bit_cast<const ElfW(Rela)*>(address);
        if (d->d_tag == DT_RELASZ) data_.bytes = d->d_un.d_val;
        if (d->d_tag == DT_JMPREL) calls_.first = std::bit_cast<const ElfW(Rela)*>(address);
        if (d->d_tag == DT_PLTRELSZ) calls_.bytes = d->d_un.d_val;
      }
    }
  }

  bool holds(const void* function) const {
    const auto address = reinterpret_cast<std::uintptr_t>(function) - info_.dlpi_addr;
    return std::any_of(info_.dlpi_phdr, info_.dlpi_phdr + info_.dlpi_phnum, [&](const auto& part) {
      return part.p_type == PT_LOAD && address - part.p_vaddr < part.p_memsz;
    });
  }

  /// Lets the library's calls of `name` arrive at `function`; `before` receives where they went.
  /// Addresses of `name` in the library's data are left.
  /// @return whether all calls are redirected
  template <typename F>
  bool redirect(std::string_view name, F function, F& before) const {
    bool done = false;
    for (const Relocations& all : {data_, calls_})
      for (std::size_t i = 0; i < all.bytes / sizeof(ElfW(Rela)); ++i) {
        const ElfW(Rela)& r = all.first[i];
        const auto type = static_cast<unsigned>(ELF64_R_TYPE(r.r_info));
        if (type != kCall && type != kAddress) continue;
        if (names_ + symbols_[ELF64_R_SYM(r.r_info)].st_name != name) continue;
        auto* const slot = at<F>(r.r_offset);
        // A slot that the dynamic linker has yet to set, it would set again.
        if (holds(reinterpret_cast<const void*>(*slot))) return false;
        before = *slot;
        if (!write(slot, function)) return false;
        done = true;
      }
    return done;
  }

 private:
  struct Relocations {
    const ElfW(Rela) * first = nullptr;
    std::size_t bytes = 0;
  };

  template <typename T>
  T* at(std::uintptr_t offset) const {
    return std::bit_cast<T*>(info_.dlpi_addr + offset);
  }

  /// The dynamic linker has made whole pages of a part of the library read-only.
  template <typename F>
  bool write(F* slot, F function) const {
    const auto page_bytes = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<std::uintptr_t>(slot);
    auto* const page = std::bit_cast<void*>(address / page_bytes * page_bytes);
    const auto* const headers = info_.dlpi_phdr;
    const bool read_only = std::any_of(headers, headers + info_.dlpi_phnum, [&](const auto& part) {
      const std::uintptr_t begin = info_.dlpi_addr + part.p_vaddr;
      const std::uintptr_t end = (begin + part.p_memsz) / page_bytes * page_bytes;
      return part.p_type == PT_GNU_RELRO && address >= begin && address < end;
    });
    if (read_only && ::mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
    __atomic_store_n(slot, function, __ATOMIC_RELEASE);
    if (read_only) ::mprotect(page, page_bytes, PROT_READ);
    return true;
  }

  const dl_phdr_info& info_;
  const ElfW(Sym) * symbols_ = nullptr;
  const char* names_ = nullptr;
  Relocations data_, calls_;
};

/// Runs when the plugin is loaded, which is never unloaded, before tessera's threads use oneDNN. Where
/// a slot can't be set, oneDNN's memory stays malloc's.
[[gnu::constructor]] void redirect_onednn() {
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void*) {
        const Library library(*info);
        if (!library.holds(reinterpret_cast<const void*>(&dnnl_sgemm))) return 0;
        if (library.redirect("free", &kept_free, free_before))
          library.redirect("posix_memalign", &kept_memalign, memalign_before);
        return 1;
      },
      nullptr);
}

}  // namespace
}  // namespace tessera::kernels::onednn
