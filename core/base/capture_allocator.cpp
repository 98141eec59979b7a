#include "core/base/capture_allocator.h"

#include <algorithm>
#include <iterator>

#include "core/base/error.h"

namespace tessera {
namespace {

constexpr std::size_t kAlignment = 512;
constexpr std::size_t kSmall = std::size_t{1} << 20;
constexpr std::size_t kSmallSlab = std::size_t{4} << 20;
constexpr std::size_t kSlabStep = std::size_t{2} << 20;

std::size_t round_up(std::size_t bytes, std::size_t step) {
  return (bytes + step - 1) / step * step;
}

}  // namespace

/// Slabs that blocks are cut from; neighbours that are free again are joined.
class CaptureAllocator::Arena {
 public:
  explicit Arena(Allocator& memory) : memory_(memory) {}
  ~Arena() {
    for (const auto& [begin, bytes] : slabs_) memory_.deallocate(begin, bytes);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(std::size_t bytes) {
    bytes = round_up(bytes, kAlignment);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second >= bytes && (best == free_.end() || it->second < best->second)) best = it;
    }
    if (best == free_.end()) {
      const std::size_t slab = bytes < kSmall ? kSmallSlab : round_up(bytes, kSlabStep);
      auto* begin = static_cast<std::byte*>(memory_.allocate(slab));
      slabs_.emplace(begin, slab);
      bytes_ += slab;
      best = free_.emplace(begin, slab).first;
    }
    const auto [begin, size] = *best;
    free_.erase(best);
    if (size > bytes) free_.emplace(begin + bytes, size - bytes);
    used_.emplace(begin, bytes);
    return begin;
  }

  /// @return false if the block is not of this arena
  bool deallocate(void* data) noexcept {
    const auto block = used_.find(static_cast<std::byte*>(data));
    if (block == used_.end()) return false;
    auto next = free_.emplace(block->first, block->second).first;
    used_.erase(block);
    if (next != free_.begin()) next = join(std::prev(next));
    join(next);
    return true;
  }

  bool is_empty() const { return used_.empty(); }
  std::size_t bytes() const { return bytes_; }

  int owners = 0;  // a capture under way, and every CapturedMemory

 private:
  using Blocks = std::map<std::byte*, std::size_t>;

  // Joins a free block with the next if they touch. @return the block that holds both, or the next
  Blocks::iterator join(Blocks::iterator block) noexcept {
    const auto next = std::next(block);
    if (next == free_.end()) return block;
    if (block->first + block->second != next->first || slabs_.contains(next->first)) return next;
    block->second += next->second;
    free_.erase(next);
    return block;
  }

  Allocator& memory_;
  Blocks slabs_, free_, used_;
  std::size_t bytes_ = 0;
};

class CaptureAllocator::Captured final : public CapturedMemory {
 public:
  Captured(CaptureAllocator& allocator, Arena* arena, std::size_t bytes)
      : allocator_(allocator), arena_(arena), bytes_(bytes) {}
  ~Captured() override { allocator_.drop(arena_); }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  std::size_t bytes() const override { return bytes_; }

  /// @throws InternalError if it is another allocator's
  Arena* arena_of(const CaptureAllocator& allocator) const {
    require<InternalError>(&allocator_ == &allocator, "a capture within another device's memory");
    return arena_;
  }

 private:
  CaptureAllocator& allocator_;
  Arena* arena_;
  std::size_t bytes_;
};

CaptureAllocator::CaptureAllocator(std::unique_ptr<Allocator> memory)
    : memory_(std::move(memory)) {}

CaptureAllocator::~CaptureAllocator() = default;

void* CaptureAllocator::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  return capturing_ != nullptr ? capturing_->allocate(bytes) : memory_->allocate(bytes);
}

void CaptureAllocator::deallocate(void* data, std::size_t bytes) noexcept {
  if (data == nullptr) return;
  const std::lock_guard lock(mutex_);
  for (auto arena = arenas_.begin(); arena != arenas_.end(); ++arena) {
    if (!(*arena)->deallocate(data)) continue;
    if ((*arena)->owners == 0 && (*arena)->is_empty()) arenas_.erase(arena);
    return;
  }
  if (capturing_ != nullptr)
    freed_later_.push_back({data, bytes});
  else
    memory_->deallocate(data, bytes);
}

void CaptureAllocator::begin_capture(const CapturedMemory* within) {
  const std::lock_guard lock(mutex_);
  require<InternalError>(capturing_ == nullptr, "a capture is under way already");
  capturing_ = within != nullptr ? static_cast<const Captured*>(within)->arena_of(*this)
                                 : arenas_.emplace_back(std::make_unique<Arena>(*memory_)).get();
  ++capturing_->owners;
  bytes_before_ = capturing_->bytes();
}

std::unique_ptr<CapturedMemory> CaptureAllocator::end_capture() {
  const std::lock_guard lock(mutex_);
  require<InternalError>(capturing_ != nullptr, "there is no capture to end");
  for (const Freed& freed : freed_later_) memory_->deallocate(freed.data, freed.bytes);
  freed_later_.clear();
  const std::size_t added = capturing_->bytes() - bytes_before_;
  return std::make_unique<Captured>(*this, std::exchange(capturing_, nullptr), added);
}

void CaptureAllocator::drop(Arena* arena) noexcept {
  const std::lock_guard lock(mutex_);
  if (--arena->owners > 0 || !arena->is_empty()) return;  // the last of these takes it along
  std::erase_if(arenas_, [arena](const auto& a) { return a.get() == arena; });
}

}  // namespace tessera
