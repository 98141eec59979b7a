#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/memory_category.h"

namespace tessera {

/// Bytes in use now and the most that were in use at once.
struct MemoryUsage {
  std::int64_t current = 0;
  std::int64_t peak = 0;
};

/// State of a ledger at its peak: bytes in use, and the allocation that reached the peak.
struct MemoryPeak {
  std::array<std::int64_t, kMemoryCategories> by_category{};
  std::string owner, phase;
};

/// One line of a ledger. Stays valid as long as the ledger.
struct MemoryEntry {
  MemoryCategory category;
  std::string owner;
  std::atomic<std::int64_t> current{0};
  std::atomic<std::int64_t> peak{0};
  MemoryEntry(MemoryCategory c, std::string o) : category(c), owner(std::move(o)) {}
};

/// Counts every byte that a Context allocates, by category and owner. Thread-safe.
class MemoryLedger {
 public:
  struct Line {
    MemoryCategory category;
    std::string owner;
    MemoryUsage usage;
  };

  MemoryLedger();
  ~MemoryLedger();
  MemoryLedger(const MemoryLedger&) = delete;
  MemoryLedger& operator=(const MemoryLedger&) = delete;

  /// The entry of (category, owner), created on first use.
  MemoryEntry& entry(MemoryCategory category, std::string_view owner);
  /// Adds `bytes`, negative on release, to an entry of this ledger.
  void book(MemoryEntry& entry, std::int64_t bytes);

  /// Most bytes that allocations may have in use at once; 0: no limit.
  void set_limit(std::int64_t bytes) { limit_ = bytes; }
  /// @throws OutOfMemory if `bytes` more would exceed the limit
  void require_room(std::int64_t bytes) const;

  MemoryUsage total() const;
  MemoryUsage usage(MemoryCategory category) const;
  /// All entries with a peak above zero, by category, then owner.
  std::vector<Line> lines() const;
  /// The lines as a table for people, with totals per category.
  std::string table() const;
  /// Sets every peak to the current value.
  void reset_peaks();

  /// Keeps the state of the peak from now on; for one thread only, as on the meta device.
  void record_peak() { recorded_.emplace(); }
  bool records_peak() const { return recorded_.has_value(); }
  const MemoryPeak& recorded_peak() const { return *recorded_; }
  /// Name of the part of the step that runs now.
  void set_phase(const std::string& phase) { phase_ = phase; }
  const std::string& phase() const { return phase_; }

 private:
  struct Entries;
  std::unique_ptr<Entries> entries_;
  std::atomic<std::int64_t> total_{0}, total_peak_{0}, limit_{0};
  std::array<std::atomic<std::int64_t>, kMemoryCategories> by_category_{}, by_category_peak_{};
  std::optional<MemoryPeak> recorded_;
  std::string phase_;
};

/// Appends the ledger's table to the message of an OutOfMemory, once.
std::string with_ledger(const std::string& message, const MemoryLedger& ledger);

/// Source of raw memory of one device. Thread-safe.
class Allocator {
 public:
  virtual ~Allocator() = default;
  /// @return at least `bytes`, aligned to 64 bytes; contents undefined. Null if bytes is 0.
  /// @throws OutOfMemory
  virtual void* allocate(std::size_t bytes) = 0;
  /// @param bytes  as given to allocate()
  virtual void deallocate(void* data, std::size_t bytes) noexcept = 0;
  /// Bytes held from the system, in use or kept for reuse.
  virtual std::size_t reserved_bytes() const = 0;
};

/// Allocator of host memory that keeps and reuses freed memory.
std::unique_ptr<Allocator> make_cpu_allocator();
/// Allocator of the meta device; returns null for every request.
std::unique_ptr<Allocator> make_meta_allocator();

/// "1.50 GiB", "12.0 MiB", "17 B"
std::string format_bytes(std::int64_t bytes);

}  // namespace tessera
