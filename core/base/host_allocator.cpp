#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
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
constexpr std::size_t kPage = std::size_t{64} << 10;  // or a part of it
constexpr std::size_t kLarge = 4096;
constexpr std::size_t kFromEnd = std::size_t{1} << 20;  // least size that is cut from a block's end
constexpr std::size_t kLeft = std::size_t{64} << 20;    // of a process's limit, to libraries
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
    for (const Region& region : regions_) unmap(region);
  }
  HostAllocator(const HostAllocator&) = delete;
  HostAllocator& operator=(const HostAllocator&) = delete;

  void* allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    require<OutOfMemory>(bytes <= kMostBytes, "{} bytes requested, more than any machine has",
                         bytes);
    const std::lock_guard lock(mutex_);
    void* const data = bytes < kLarge ? small(bytes) : large(block_size(bytes));
    if (data == nullptr)
      throw OutOfMemory("host memory is exhausted: {} requested, {} held",
                        format_bytes(static_cast<std::int64_t>(bytes)),
                        format_bytes(static_cast<std::int64_t>(held())));
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
    try {
      insert(static_cast<std::byte*>(data), block_size(bytes));
    } catch (const std::bad_alloc&) {  // without memory for the list, the block is lost
    }
  }

  std::size_t reserved_bytes() const override {
    const std::lock_guard lock(mutex_);
    return held();
  }

 private:
  // Addresses [begin, end), of which those below `committed` have memory, and those below `top` were
  // in use.
  struct Region {
    void* mapping;
    std::size_t mapped;
    std::byte *begin, *top, *committed, *end;
  };
  using Blocks = std::map<std::byte*, std::size_t>;

  static std::size_t distance(const std::byte* from, const std::byte* to) {
    return static_cast<std::size_t>(to - from);
  }
  std::size_t held() const {
    std::size_t bytes = small_bytes_;
    for (const Region& region : regions_) bytes += distance(region.begin, region.top);
    return bytes;
  }

  void* small(std::size_t bytes) {
    const std::size_t size = round_up(bytes, kAlignment);
    void* const data = std::aligned_alloc(kAlignment, size);
    if (data != nullptr) small_bytes_ += size;
    return data;
  }

  // From the smallest free block that is large enough, at the lowest address; null: the system has no more.
  // Large ones are cut from the end of one that lay between others: backward frees activations from high to low
  // addresses, so what is left joins the next of them, and has room for the next gradient.
  void* large(std::size_t size) {
    auto found = by_size_.lower_bound({size, nullptr});
    if (found == by_size_.end()) {
      if (!add_region(size)) return nullptr;
      found = by_size_.lower_bound({size, nullptr});
    }
    const auto [available, block] = *found;
    const bool from_end = size >= kFromEnd && block + available <= region_of(block).top;
    std::byte* const begin = from_end ? block + (available - size) : block;
    if (!commit(begin, begin + size)) {
      give_back();
      if (!commit(begin, begin + size)) return nullptr;
    }
    erase(free_.find(block));
    if (available > size) insert(from_end ? block : begin + size, available - size);
    return begin;
  }

  Region& region_of(const std::byte* address) {
    return *std::ranges::find_if(
        regions_, [=](const Region& r) { return r.begin <= address && address < r.end; });
  }

  // Gets memory for [begin, end). The system may refuse it.
  bool commit(std::byte* begin, std::byte* end) {
    Region& region = region_of(begin);
    std::byte* from = region.committed;
    if (gave_back_)
      from = std::min(from, region.begin + distance(region.begin, begin) / kPage * kPage);
    const std::size_t bytes = from < end ? round_up(distance(from, end), kHugePage) : 0;
    std::byte* const to = std::min(from + bytes, region.end);
    if (bytes > 0 && mprotect(from, distance(from, to), PROT_READ | PROT_WRITE) != 0) return false;
    if (to > region.committed) {
      poison(region.committed, distance(region.committed, to));
      region.committed = to;
    }
    region.top = std::max(region.top, end);
    return true;
  }

  // Returns the memory of free blocks, after the system refused more; commit() gets it again.
  void give_back() {
    gave_back_ = true;
    for (const auto& [begin, size] : free_) {
      const Region& region = region_of(begin);
      const std::size_t first = round_up(distance(region.begin, begin), kPage);
      std::byte* const from = region.begin + first;
      std::byte* const to = std::min(
          region.begin + distance(region.begin, begin + size) / kPage * kPage, region.committed);
      if (from >= to) continue;
      constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
      if (mmap(from, distance(from, to), PROT_NONE, kFlags, -1, 0) != MAP_FAILED)
        madvise(from, distance(from, to), MADV_HUGEPAGE);
    }
  }

  // Takes addresses for all of the machine's memory, or as many as there are.
  bool add_region(std::size_t least) {
    least = round_up(least, kHugePage);
    std::size_t mapped = 0;
    for (const Region& region : regions_) mapped += region.mapped;
    if (const auto limit = limit_of_addresses(); limit != RLIM_INFINITY) {
      const std::size_t wanted = round_up(std::max(8 * kHugePage, mapped / 8), kHugePage);
      if (map_within(limit, std::max(least, wanted)) || map_within(limit, least)) return true;
      unmap_free_regions();
      return map_within(limit, least);
    }
    const auto memory = static_cast<std::size_t>(std::max(sysconf(_SC_PHYS_PAGES), 1L)) *
                        static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    for (std::size_t size = round_up(std::max(memory, mapped), kHugePage); size > least;
         size = round_up(size / 2, kHugePage))
      if (map(size)) return true;
    return map(least);
  }

  static rlim_t limit_of_addresses() {
    rlimit limit{};
    return getrlimit(RLIMIT_AS, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
  }
  // Leaves addresses to libraries: oneDNN crashes where it gets no memory for its code.
  bool map_within(rlim_t limit, std::size_t size) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const std::size_t used = pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return used + size + kHugePage + kLeft <= limit && map(size);
  }

  bool map(std::size_t size) {
    // Without MAP_NORESERVE, so that commit() fails where the system's rules on memory say so.
    const std::size_t mapped = size + kHugePage;
    void* const mapping = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return false;
    const auto unaligned = reinterpret_cast<std::uintptr_t>(mapping) % kHugePage;
    std::byte* const begin = static_cast<std::byte*>(mapping) + (kHugePage - unaligned);
    madvise(begin, size, MADV_HUGEPAGE);
    regions_.push_back({mapping, mapped, begin, begin, begin, begin + size});
    insert(begin, size);
    return true;
  }
  static void unmap(const Region& region) {
    unpoison(region.begin, distance(region.begin, region.committed));
    munmap(region.mapping, region.mapped);
  }
  void unmap_free_regions() {
    std::erase_if(regions_, [this](const Region& region) {
      const auto block = free_.find(region.begin);
      if (block == free_.end() || block->second != distance(region.begin, region.end)) return false;
      erase(block);
      unmap(region);
      return true;
    });
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
  std::vector<Region> regions_;  // with gaps between them
  Blocks free_;                  // by address; no two are neighbors
  std::set<std::pair<std::size_t, std::byte*>> by_size_;
  std::size_t small_bytes_ = 0;
  bool gave_back_ = false;  // memory of free blocks below `committed`
};

}  // namespace

std::unique_ptr<Allocator> make_cpu_allocator() { return std::make_unique<HostAllocator>(); }

}  // namespace tessera
