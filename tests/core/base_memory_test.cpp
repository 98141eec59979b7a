#include <doctest/doctest.h>

#include <cstring>
#include <limits>
#include <thread>

#include "core/base/caching_allocator.h"
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

TEST_CASE("a freed block is reused, and trim releases it") {
  const auto allocator = make_cpu_allocator();
  void* first = allocator->allocate(10000);
  const std::size_t held = allocator->reserved_bytes();
  CHECK(held >= 10000);
  allocator->deallocate(first, 10000);
  CHECK(allocator->reserved_bytes() == held);
  void* again = allocator->allocate(9990);
  CHECK(again == first);
  CHECK(allocator->reserved_bytes() == held);
  void* much_smaller = allocator->allocate(100);
  CHECK(much_smaller != nullptr);
  CHECK(allocator->reserved_bytes() > held);
  allocator->trim();
  CHECK(allocator->reserved_bytes() > held);
  allocator->deallocate(again, 9990);
  allocator->deallocate(much_smaller, 100);
  allocator->trim();
  CHECK(allocator->reserved_bytes() == 0);
}

TEST_CASE("a small request does not use a large idle block") {
  const auto allocator = make_cpu_allocator();
  void* large = allocator->allocate(1 << 20);
  allocator->deallocate(large, 1 << 20);
  void* small = allocator->allocate(1 << 10);
  CHECK(small != large);
  allocator->deallocate(small, 1 << 10);
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
