#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/memory.h"
#include "core/base/storage.h"
#include "tests/support/check_throws.h"

namespace tessera {
namespace {

TEST_CASE("the ledger books by owner and category, with totals and peaks") {
  MemoryLedger ledger;
  auto& weights = ledger.entry(MemoryCategory::Parameters, "h.0");
  auto& scratch = ledger.entry(MemoryCategory::Workspace, "matmul");
  auto& other = ledger.entry(MemoryCategory::Workspace, "attention");
  ledger.book(weights, 1000);
  ledger.book(scratch, 500);
  ledger.book(scratch, -500);
  ledger.book(other, 200);
  CHECK(ledger.total().current == 1200);
  CHECK(ledger.total().peak == 1500);
  CHECK(ledger.usage(MemoryCategory::Workspace).current == 200);
  CHECK(ledger.usage(MemoryCategory::Workspace).peak == 500);
  CHECK(ledger.usage(MemoryCategory::Gathered).peak == 0);
  CHECK(&ledger.entry(MemoryCategory::Parameters, "h.0") == &weights);
  CHECK(&ledger.entry(MemoryCategory::Gathered, "h.0") != &weights);

  const auto lines = ledger.lines();  // sorted, without empty entries
  REQUIRE(lines.size() == 3);
  CHECK(lines[0].owner == "h.0");
  CHECK(lines[1].owner == "attention");
  CHECK(lines[2].owner == "matmul");
  CHECK(lines[2].usage.peak == 500);

  ledger.reset_peaks();
  CHECK(ledger.total().peak == 1200);
  CHECK(ledger.usage(MemoryCategory::Workspace).peak == 200);
}

TEST_CASE("the ledger's table contains owners and totals") {
  MemoryLedger ledger;
  ledger.book(ledger.entry(MemoryCategory::OptimizerState, "adamw"), 3 << 20);
  const std::string table = ledger.table();
  CHECK(table.find("optimizer state") != std::string::npos);
  CHECK(table.find("adamw") != std::string::npos);
  CHECK(table.find("total") != std::string::npos);
  CHECK(table.find("3.00 MiB") != std::string::npos);
}

TEST_CASE("the ledger counts correctly with several threads") {
  MemoryLedger ledger;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        auto& entry = ledger.entry(MemoryCategory::Activations, i % 2 == 0 ? "even" : "odd");
        ledger.book(entry, 8);
        ledger.book(entry, -5);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(ledger.total().current == 4 * 1000 * 3);
  CHECK(ledger.usage(MemoryCategory::Activations).current == 4 * 1000 * 3);
  CHECK(ledger.entry(MemoryCategory::Activations, "odd").current == 4 * 500 * 3);
  CHECK(ledger.total().peak >= ledger.total().current);
}

TEST_CASE("every category has a distinct name") {
  for (int a = 0; a < kMemoryCategories; ++a) {
    const auto name = memory_category_name(static_cast<MemoryCategory>(a));
    CHECK_FALSE(name.empty());
    for (int b = 0; b < a; ++b) CHECK(name != memory_category_name(static_cast<MemoryCategory>(b)));
  }
}

TEST_CASE("host memory is aligned and writable at every size") {
  const auto allocator = make_cpu_allocator();
  for (const std::size_t bytes : {1, 63, 64, 65, 4097, 1 << 20, (2 << 20) + 1, 5 << 20}) {
    CAPTURE(bytes);
    void* data = allocator->allocate(bytes);
    REQUIRE(data != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(data) % 64 == 0);
    std::memset(data, 0x5a, bytes);
    allocator->deallocate(data, bytes);
  }
  CHECK(allocator->allocate(0) == nullptr);
  CHECK_NOTHROW(allocator->deallocate(nullptr, 0));
}

TEST_CASE("freed neighbors join, so memory of many blocks serves larger ones") {
  const auto allocator = make_cpu_allocator();
  constexpr std::size_t kBlock = 3 << 20;
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(allocator->allocate(kBlock));
  void* const last = allocator->allocate(kBlock);
  const std::size_t held = allocator->reserved_bytes();
  CHECK(held >= 9 * kBlock);
  for (const int i : {1, 3, 2, 7, 5, 0, 4, 6}) allocator->deallocate(blocks[i], kBlock);
  CHECK(allocator->reserved_bytes() == held);
  void* const large = allocator->allocate(5 * kBlock);
  void* const rest = allocator->allocate(3 * kBlock);
  // With AddressSanitizer there are gaps between blocks.
  const auto is_near = [](const void* a, const void* b) {
    return std::abs(static_cast<const char*>(a) - static_cast<const char*>(b)) < 1024;
  };
  CHECK(is_near(large, blocks[3]));
  CHECK(is_near(rest, blocks[0]));
  CHECK(allocator->reserved_bytes() == held);
  // A free block at the end grows by what it lacks.
  allocator->deallocate(last, kBlock);
  void* const longer = allocator->allocate(2 * kBlock);
  CHECK(is_near(longer, last));
  CHECK(allocator->reserved_bytes() <= held + kBlock);
  allocator->deallocate(large, 5 * kBlock);
  allocator->deallocate(rest, 3 * kBlock);
  allocator->deallocate(longer, 2 * kBlock);
}

TEST_CASE(
    "gradients fit into what activations leave, though each is larger than those of its layer") {
  const auto allocator = make_cpu_allocator();
  constexpr std::size_t kActivations = 2400 << 10, kGradient = 2700 << 10, kLogits = 6 << 20;
  std::vector<void*> activations, gradients;
  for (int layer = 0; layer < 8; ++layer) activations.push_back(allocator->allocate(kActivations));
  void* const logits = allocator->allocate(kLogits);
  const std::size_t held = allocator->reserved_bytes();
  allocator->deallocate(logits, kLogits);
  for (; !activations.empty(); activations.pop_back()) {
    gradients.push_back(allocator->allocate(kGradient));
    allocator->deallocate(activations.back(), kActivations);
  }
  CHECK(allocator->reserved_bytes() == held);
  for (void* const gradient : gradients) allocator->deallocate(gradient, kGradient);
}

TEST_CASE("the smallest free block that fits is used") {
  const auto allocator = make_cpu_allocator();
  std::vector<void*> blocks;
  for (const std::size_t bytes : {900'000, 50'000, 300'000, 50'000, 600'000, 50'000})
    blocks.push_back(allocator->allocate(bytes));
  allocator->deallocate(blocks[0], 900'000);
  allocator->deallocate(blocks[2], 300'000);
  allocator->deallocate(blocks[4], 600'000);
  CHECK(allocator->allocate(250'000) == blocks[2]);
  CHECK(allocator->allocate(601'000) == blocks[0]);
  CHECK(allocator->allocate(400'000) == blocks[4]);
}

TEST_CASE("blocks of any sizes keep their contents, and nothing is lost between them") {
  const auto allocator = make_cpu_allocator();
  struct Block {
    unsigned char* data;
    std::size_t bytes;
    unsigned char value;
  };
  std::vector<Block> blocks;
  std::mt19937 random(7);
  std::size_t in_use = 0, most = 0;
  for (int i = 0; i < 4000; ++i) {
    if (!blocks.empty() && (blocks.size() > 40 || random() % 2 == 0)) {
      const std::size_t at = random() % blocks.size();
      const Block block = std::exchange(blocks[at], blocks.back());
      blocks.pop_back();
      for (const std::size_t j : {std::size_t{0}, block.bytes / 2, block.bytes - 1})
        REQUIRE(block.data[j] == block.value);
      allocator->deallocate(block.data, block.bytes);
      in_use -= block.bytes;
      continue;
    }
    const std::size_t bytes = 1 + random() % (std::size_t{1} << (4 + random() % 18));
    const auto value = static_cast<unsigned char>(random());
    auto* const data = static_cast<unsigned char*>(allocator->allocate(bytes));
    std::memset(data, value, bytes);
    blocks.push_back({data, bytes, value});
    most = std::max(most, in_use += bytes);
  }
  CHECK(allocator->reserved_bytes() < 2 * most);
  for (const Block& block : blocks) allocator->deallocate(block.data, block.bytes);
  const std::size_t held = allocator->reserved_bytes();
  void* const all = allocator->allocate(held - 4096);  // every free block joined
  CHECK(allocator->reserved_bytes() == held);
  allocator->deallocate(all, held - 4096);
}

TEST_CASE("an impossible request throws") {
  const auto allocator = make_cpu_allocator();
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  for (const std::size_t bytes : {kMost, kMost - 64, kMost / 2 + 1}) {
    CAPTURE(bytes);
    CHECK_THROWS_AS(allocator->allocate(bytes), OutOfMemory);
  }
  CHECK(allocator->reserved_bytes() == 0);
}

TEST_CASE("a request for more than the machine has is refused, and later ones are served") {
  constexpr std::size_t kTooMuch = std::size_t{1} << 45;
  void* const granted =
      mmap(nullptr, kTooMuch, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (granted != MAP_FAILED) {  // this system refuses nothing
    munmap(granted, kTooMuch);
    return;
  }
  const auto allocator = make_cpu_allocator();
  for (int i = 0; i < 3; ++i) CHECK_THROWS_AS(allocator->allocate(kTooMuch), OutOfMemory);
  CHECK(allocator->reserved_bytes() == 0);
  allocator->deallocate(allocator->allocate(1 << 20), 1 << 20);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Calls body() with `room` bytes left of a process's limit, if that can be set.
void with_limit(int resource, std::size_t held, std::size_t room,
                const std::function<void()>& body) {
  rlimit before{};
  REQUIRE(getrlimit(resource, &before) == 0);
  rlimit limit = before;
  limit.rlim_cur = held + room;
  if (setrlimit(resource, &limit) != 0) return;
  const std::unique_ptr<rlimit, std::function<void(rlimit*)>> restored(
      &before, [=](const rlimit* old) { setrlimit(resource, old); });
  body();
}

TEST_CASE("a process with a limit can use most of it, more than once") {
  constexpr std::size_t kMiB = 1 << 20, kRoom = 1024 * kMiB;
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::size_t all = 0, data = 0, other = 0;  // pages
  std::ifstream("/proc/self/statm") >> all >> other >> other >> other >> other >> data;
  const auto fill_and_free = [&] {
    const auto allocator = make_cpu_allocator();
    for (const std::size_t bytes : {33 * kMiB, 450 * kMiB, 40 * kMiB, 800 * kMiB}) {
      std::vector<void*> blocks;
      try {
        while (blocks.size() < 100) blocks.push_back(allocator->allocate(bytes));
      } catch (const OutOfMemory&) {
      }
      CAPTURE(bytes);
      CHECK(blocks.size() * bytes > kRoom * 7 / 10);
      for (void* const block : blocks) std::memset(block, 1, 64);
      for (void* const block : blocks) allocator->deallocate(block, bytes);
    }
  };
  SUBCASE("of addresses") { with_limit(RLIMIT_AS, all * page, kRoom, fill_and_free); }
  SUBCASE("of data") { with_limit(RLIMIT_DATA, data * page, kRoom, fill_and_free); }
}
#endif

TEST_CASE("a limit is reached to the byte, whatever the allocator keeps for reuse") {
  const auto context = Context::create();
  context->ledger().set_limit(100'000);
  const auto make = [&](std::size_t bytes) {
    return Storage::allocate(context, bytes, MemoryCategory::Data, "data");
  };
  auto first = make(60'000);
  CHECK_THROWS_HOLDING(OutOfMemory, "39.1 KiB requested, 58.6 KiB held of a limit of 97.7 KiB",
                       make(40'001));
  const auto rest = make(40'000);
  first.reset();
  const auto again = make(60'000);
  CHECK_THROWS_AS(make(1), OutOfMemory);
  context->ledger().set_limit(0);
  CHECK(make(1'000'000) != nullptr);
}

TEST_CASE("the meta device allocates no memory") {
  const auto allocator = make_meta_allocator();
  CHECK(allocator->allocate(1 << 30) == nullptr);
  CHECK(allocator->reserved_bytes() == 0);
}

TEST_CASE("byte counts are formatted in human-readable units") {
  CHECK(format_bytes(0) == "0 B");
  CHECK(format_bytes(17) == "17 B");
  CHECK(format_bytes(1023) == "1023 B");
  CHECK(format_bytes(1024) == "1.00 KiB");
  CHECK(format_bytes(12 << 20) == "12.0 MiB");
  CHECK(format_bytes(std::int64_t{3} << 29) == "1.50 GiB");
  CHECK(format_bytes(std::int64_t{2048} << 40) == "2048.0 TiB");
}

}  // namespace
}  // namespace tessera
