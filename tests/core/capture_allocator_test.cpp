#include "core/base/capture_allocator.h"

#include <doctest/doctest.h>

#include <set>

#include "core/base/error.h"

namespace tessera {
namespace {

/// Host memory that counts what it has handed out.
class Counted final : public Allocator {
 public:
  explicit Counted(std::set<void*>& live) : live_(live) {}
  void* allocate(std::size_t bytes) override {
    require<OutOfMemory>(bytes <= limit, "no memory");
    return *live_.insert(::operator new (bytes, std::align_val_t{64})).first;
  }
  void deallocate(void* data, std::size_t) noexcept override {
    CHECK(live_.erase(data) == 1);
    ::operator delete (data, std::align_val_t{64});
  }
  std::size_t reserved_bytes() const override { return 0; }
  void trim() noexcept override {}

  static constexpr std::size_t limit = std::size_t{64} << 20;

 private:
  std::set<void*>& live_;
};

std::size_t distance(const void* a, const void* b) {
  return static_cast<std::size_t>(static_cast<const std::byte*>(b) -
                                  static_cast<const std::byte*>(a));
}

TEST_CASE("memory of a capture is reused within it, and stays until both sides have let go") {
  std::set<void*> live;
  {
    CaptureAllocator allocator(std::make_unique<Counted>(live));
    void* before = allocator.allocate(100);
    void* kept = allocator.allocate(100);
    CHECK(live.size() == 2);

    allocator.begin_capture();
    CHECK_THROWS_AS(allocator.begin_capture(), InternalError);
    void* a = allocator.allocate(1000);
    void* b = allocator.allocate(1000);
    CHECK(distance(a, b) == 1024);  // of one slab
    CHECK(live.size() == 3);
    allocator.deallocate(before, 100);
    CHECK(live.contains(before));  // captured work may read it
    allocator.deallocate(a, 1000);
    CHECK(allocator.allocate(900) == a);
    allocator.deallocate(a, 900);
    allocator.deallocate(b, 1000);
    CHECK(allocator.allocate(3000) == a);  // neighbours are joined
    allocator.deallocate(a, 3000);
    void* large = allocator.allocate(std::size_t{3} << 20);
    CHECK(large == a);
    allocator.deallocate(large, std::size_t{3} << 20);
    void* outlives = allocator.allocate(10);
    auto memory = allocator.end_capture();
    CHECK(memory->bytes() == std::size_t{4} << 20);
    CHECK_FALSE(live.contains(before));

    // Later requests do not touch what the captured work uses.
    void* after = allocator.allocate(900);
    CHECK(live.contains(after));
    allocator.deallocate(after, 900);
    memory.reset();
    CHECK(live.size() == 2);  // `kept`, and the slab of the block that outlives
    allocator.deallocate(outlives, 10);
    CHECK(live == std::set<void*>{kept});
    allocator.deallocate(kept, 100);
  }
  CHECK(live.empty());
}

TEST_CASE("captures share memory, each says what it added, and the last takes it along") {
  constexpr std::size_t kLarge = std::size_t{3} << 20, kSlab = std::size_t{4} << 20;
  std::set<void*> live;
  CaptureAllocator allocator(std::make_unique<Counted>(live));
  allocator.begin_capture();
  void* first = allocator.allocate(kLarge);
  allocator.deallocate(first, kLarge);
  void* outlives = allocator.allocate(1000);
  auto one = allocator.end_capture();
  CHECK(one->bytes() == kSlab);

  allocator.begin_capture(one.get());
  void* second = allocator.allocate(kLarge);
  CHECK(second != outlives);
  CHECK(live.size() == 1);  // of the same slab
  void* more = allocator.allocate(kLarge);
  CHECK(live.size() == 2);
  allocator.deallocate(second, kLarge);
  allocator.deallocate(more, kLarge);
  auto two = allocator.end_capture();
  CHECK(two->bytes() == kSlab);
  allocator.begin_capture(two.get());
  allocator.deallocate(allocator.allocate(2 * kLarge), 2 * kLarge);
  auto failed = allocator.end_capture();
  CHECK(failed->bytes() == 2 * kLarge);
  failed.reset();
  CHECK(live.size() == 3);

  one.reset();
  allocator.deallocate(outlives, 1000);
  CHECK(live.size() == 3);  // captured work runs on it
  two.reset();
  CHECK(live.empty());

  CaptureAllocator other(std::make_unique<Counted>(live));
  other.begin_capture();
  auto foreign = other.end_capture();
  CHECK_THROWS_AS(allocator.begin_capture(foreign.get()), InternalError);
  allocator.begin_capture();  // nothing is under way
  allocator.end_capture();
}

TEST_CASE("a capture without memory fails like any request, and can be ended") {
  std::set<void*> live;
  CaptureAllocator allocator(std::make_unique<Counted>(live));
  allocator.begin_capture();
  void* a = allocator.allocate(10);
  CHECK_THROWS_AS(allocator.allocate(Counted::limit + 1), OutOfMemory);
  allocator.deallocate(a, 10);
  allocator.end_capture();
  CHECK(live.empty());
  CHECK_THROWS_AS(allocator.end_capture(), InternalError);
  CHECK(allocator.allocate(0) == nullptr);
}

}  // namespace
}  // namespace tessera
