#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// Lets the address sanitizer find uses of freed values.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TESSERA_POISONS_ARENA
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define TESSERA_POISONS_ARENA
#endif
#ifdef TESSERA_POISONS_ARENA
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(data, bytes) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(data, bytes) static_cast<void>(0)
#endif

namespace tessera::io {

/// Memory for values without destructors, freed from the newest on. Moving it keeps their addresses.
class PickleArena {
 public:
  /// The values allocated so far. Later marks compare greater.
  struct Mark {
    std::size_t blocks = 0, used = 0;
    friend auto operator<=>(const Mark&, const Mark&) = default;
  };

  /// @return `bytes` of memory, aligned to 8 bytes
  void* allocate(std::size_t bytes) {
    bytes = (bytes + 7) / 8 * 8;
    if (blocks_.empty() || bytes > blocks_.back().size - blocks_.back().used) add_block(bytes);
    Block& block = blocks_.back();
    void* const data = block.data.get() + block.used;
    ASAN_UNPOISON_MEMORY_REGION(data, bytes);
    block.used += bytes;
    return data;
  }
  Mark mark() const { return {blocks_.size(), blocks_.empty() ? 0 : blocks_.back().used}; }
  /// Frees everything allocated after the mark.
  void rewind(const Mark& mark) {
    if (blocks_.size() > mark.blocks) {
      spare_ = std::move(blocks_[mark.blocks]);
      blocks_.resize(mark.blocks);
    }
    if (blocks_.empty()) return;
    blocks_.back().used = mark.used;
    ASAN_POISON_MEMORY_REGION(blocks_.back().data.get() + mark.used,
                              blocks_.back().size - mark.used);
  }
  /// Bytes allocated and not freed.
  std::size_t bytes() const {
    return blocks_.empty() ? 0 : blocks_.back().before + blocks_.back().used;
  }

 private:
  static constexpr std::size_t kLeastBlock = 4096, kMostBlock = std::size_t{1} << 20;
  struct Block {
    std::unique_ptr<std::byte[]> data;
    std::size_t size = 0, used = 0;
    std::size_t before = 0;  // bytes allocated in earlier blocks
  };

  void add_block(std::size_t least) {
    const std::size_t before = bytes();
    if (spare_.size < least) {
      const std::size_t last = blocks_.empty() ? 0 : blocks_.back().size;
      spare_.size = std::max(least, std::clamp(2 * last, kLeastBlock, kMostBlock));
      spare_.data.reset(new std::byte[spare_.size]);
    }
    ASAN_POISON_MEMORY_REGION(spare_.data.get(), spare_.size);
    spare_.used = 0;
    spare_.before = before;
    blocks_.push_back(std::exchange(spare_, {}));
  }

  std::vector<Block> blocks_;
  Block spare_;  // saves allocations when values at the border of two blocks come and go
};

}  // namespace tessera::io
