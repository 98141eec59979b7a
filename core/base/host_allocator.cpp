#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/memory.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TESSERA_ADDRESS_SANITIZER 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define TESSERA_ADDRESS_SANITIZER 1
#endif
#if defined(TESSERA_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#endif

namespace tessera {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kLarge = std::size_t{32} << 10;
constexpr std::size_t kLimited = std::size_t{64} << 20;
// Beyond any address space, yet small enough that rounding up does not overflow.
constexpr std::size_t kMostBytes = std::size_t{1} << 56;

// With AddressSanitizer, an access to poisoned memory is an error; else these do nothing.
#if defined(TESSERA_ADDRESS_SANITIZER)
constexpr std::size_t kGap = 64;  // between blocks
void poison(void* data, std::size_t bytes) { __asan_poison_memory_region(data, bytes); }
void unpoison(void* data, std::size_t bytes) { __asan_unpoison_memory_region(data, bytes); }
#else
constexpr std::size_t kGap = 0;
void poison(void*, std::size_t) {}
void unpoison(void*, std::size_t) {}
#endif

std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

std::size_t block_size(std::size_t bytes) { return round_up(bytes, kAlignment) + kGap; }

// Memory of the CPU. Large blocks are cut from a range of addresses in which freed neighbors join, so
// that gradients of any size use what activations left. Freed memory is kept: a warm training step
// takes no page faults. Small blocks come from malloc.
class HostAllocator final : public Allocator {
 public:
  HostAllocator() = default;
  ~HostAllocator() override {
    for (const Region& region : regions_) {
      unpoison(region.begin, size_of(region));
      munmap(region.mapping, region.mapped);
    }
  }
  HostAllocator(const HostAllocator&) = delete;
  HostAllocator& operator=(const HostAllocator&) = delete;

  void* allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    require<OutOfMemory>(bytes <= kMostBytes, "{} bytes requested, more than any machine has",
                         bytes);
    const std::lock_guard lock(mutex_);
    void* const data = bytes < kLarge ? small(bytes) : large(block_size(bytes));
    const auto text = [](std::size_t n) { return format_bytes(static_cast<std::int64_t>(n)); };
    require<OutOfMemory>(data != nullptr, "host memory is exhausted: {} requested, {} held",
                         text(bytes), text(held()));
    unpoison(data, bytes);
    return data;
  }

  void deallocate(void* data, std::size_t bytes) noexcept override {
    if (data == nullptr) return;
    const std::lock_guard lock(mutex_);
    if (bytes < kLarge) {
      std::free(data);
      small_bytes_ -= round_up(bytes, kAlignment);
      return;
    }
    poison(data, bytes);
    insert(static_cast<std::byte*>(data), block_size(bytes));
  }

  std::size_t reserved_bytes() const override {
    const std::lock_guard lock(mutex_);
    return held();
  }

 private:
  // Addresses from the system: [begin, end). Blocks were cut from those below `top`; those below
  // `committed` may be used.
  struct Region {
    void* mapping;
    std::size_t mapped;
    std::byte *begin, *top, *committed, *end;
  };
  using Blocks = std::map<std::byte*, std::size_t>;

  static std::size_t size_of(const Region& region) {
    return static_cast<std::size_t>(region.end - region.begin);
  }
  std::size_t held() const {
    std::size_t bytes = small_bytes_;
    for (const Region& region : regions_)
      bytes += static_cast<std::size_t>(region.top - region.begin);
    return bytes;
  }

  void* small(std::size_t bytes) {
    const std::size_t size = round_up(bytes, kAlignment);
    void* const data = std::aligned_alloc(kAlignment, size);
    if (data != nullptr) small_bytes_ += size;
    return data;
  }

  // The smallest free block that is large enough, at the lowest address, or new memory.
  void* large(std::size_t size) {
    const auto found = by_size_.lower_bound({size, nullptr});
    if (found == by_size_.end()) {
      void* const data = extend(size);
      return data != nullptr || !add_region(size) ? data : extend(size);
    }
    const auto [available, begin] = *found;
    erase(free_.find(begin));
    if (available > size) insert(begin + size, available - size);
    return begin;
  }

  // Raises the top of the last region by what its last free block lacks; null: not possible.
  std::byte* extend(std::size_t size) {
    if (regions_.empty()) return nullptr;
    Region& region = regions_.back();
    auto last = free_.lower_bound(region.top);
    const bool joins =
        last != free_.begin() && std::prev(last)->first + std::prev(last)->second == region.top;
    std::byte* const begin = joins ? std::prev(last)->first : region.top;
    if (static_cast<std::size_t>(region.end - begin) < size) return nullptr;
    std::byte* const top = begin + size;
    if (top > region.committed) {
      const std::size_t more =
          round_up(static_cast<std::size_t>(top - region.committed), kHugePage);
      if (mprotect(region.committed, more, PROT_READ | PROT_WRITE) != 0) return nullptr;
      poison(region.committed, more);
      region.committed += more;
    }
    if (joins) erase(std::prev(last));
    region.top = top;
    return begin;
  }

  // Addresses for twice the machine's memory, unless the process has a limit of them.
  bool add_region(std::size_t least) {
    rlimit limit{};
    const bool limited = getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY;
    const auto memory = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
                        static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t size = round_up(std::max(least, limited ? kLimited : 2 * memory), kHugePage);
    const std::size_t mapped = size + kHugePage;
    void* const mapping =
        mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return false;
    const auto unaligned = reinterpret_cast<std::uintptr_t>(mapping) % kHugePage;
    std::byte* const begin = static_cast<std::byte*>(mapping) + (kHugePage - unaligned);
    madvise(begin, size, MADV_HUGEPAGE);
    regions_.push_back({mapping, mapped, begin, begin, begin, begin + size});
    return true;
  }

  void insert(std::byte* begin, std::size_t size) {
    const auto next = free_.lower_bound(begin);
    if (next != free_.end() && begin + size == next->first) {
      size += next->second;
      erase(next);
    }
    const auto after = free_.lower_bound(begin);
    if (after != free_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == begin) {
        begin = before->first;
        size += before->second;
        erase(before);
      }
    }
    free_.emplace(begin, size);
    by_size_.emplace(size, begin);
  }
  void erase(Blocks::iterator block) {
    by_size_.erase({block->second, block->first});
    free_.erase(block);
  }

  mutable std::mutex mutex_;
  std::vector<Region> regions_;
  Blocks free_;  // by address; no two are neighbors
  std::set<std::pair<std::size_t, std::byte*>> by_size_;
  std::size_t small_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Allocator> make_cpu_allocator() { return std::make_unique<HostAllocator>(); }

}  // namespace tessera
