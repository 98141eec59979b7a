#include "core/base/memory.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "core/base/error.h"

namespace tessera {
namespace {

void raise_peak(std::atomic<std::int64_t>& peak, std::int64_t value) {
  std::int64_t seen = peak.load(std::memory_order_relaxed);
  while (seen < value && !peak.compare_exchange_weak(seen, value)) {
  }
}

std::string table_head() {
  return fmt::format("{:<16} {:<28} {:>12} {:>12}\n", "category", "owner", "now", "peak");
}

class MetaAllocator final : public Allocator {
 public:
  void* allocate(std::size_t) override { return nullptr; }
  void deallocate(void*, std::size_t) noexcept override {}
  std::size_t reserved_bytes() const override { return 0; }
};

}  // namespace

std::string_view memory_category_name(MemoryCategory category) {
  static constexpr std::array<std::string_view, kMemoryCategories> kNames = {
      "parameters", "gradients",     "optimizer state", "gathered", "activations",
      "workspace",  "communication", "staging",         "data"};
  return kNames.at(static_cast<std::size_t>(category));
}

struct MemoryLedger::Entries {
  std::mutex mutex;
  std::map<std::pair<MemoryCategory, std::string>, std::unique_ptr<MemoryEntry>> by_owner;
};

MemoryLedger::MemoryLedger() : entries_(std::make_unique<Entries>()) {}
MemoryLedger::~MemoryLedger() = default;

MemoryEntry& MemoryLedger::entry(MemoryCategory category, std::string_view owner) {
  const std::lock_guard lock(entries_->mutex);
  auto& slot = entries_->by_owner[{category, std::string(owner)}];
  if (!slot) slot = std::make_unique<MemoryEntry>(category, std::string(owner));
  return *slot;
}

void MemoryLedger::book(MemoryEntry& entry, std::int64_t bytes) {
  const auto add = [bytes](std::atomic<std::int64_t>& current, std::atomic<std::int64_t>& peak) {
    const std::int64_t now = current.fetch_add(bytes) + bytes;
    if (bytes > 0) raise_peak(peak, now);
  };
  const auto c = static_cast<std::size_t>(entry.category);
  add(entry.current, entry.peak);
  add(by_category_[c], by_category_peak_[c]);
  const std::int64_t before = total_peak_.load();
  add(total_, total_peak_);
  if (!recorded_ || total_peak_.load() == before) return;
  for (std::size_t i = 0; i < by_category_.size(); ++i)
    recorded_->by_category[i] = by_category_[i].load();
  recorded_->owner = entry.owner;
  recorded_->phase = phase_;
}

void MemoryLedger::require_room(std::int64_t bytes) const {
  const std::int64_t limit = limit_.load(), held = total_.load();
  require<OutOfMemory>(limit == 0 || held <= limit - bytes,
                       "host memory is exhausted: {} requested, {} held of a limit of {}",
                       format_bytes(bytes), format_bytes(held), format_bytes(limit));
}

MemoryUsage MemoryLedger::total() const { return {total_.load(), total_peak_.load()}; }

MemoryUsage MemoryLedger::usage(MemoryCategory category) const {
  const auto c = static_cast<std::size_t>(category);
  return {by_category_[c].load(), by_category_peak_[c].load()};
}

std::vector<MemoryLedger::Line> MemoryLedger::lines() const {
  const std::lock_guard lock(entries_->mutex);
  std::vector<Line> result;
  for (const auto& [key, entry] : entries_->by_owner) {
    if (entry->peak == 0) continue;
    result.push_back({entry->category, entry->owner, {entry->current, entry->peak}});
  }
  return result;
}

std::string MemoryLedger::table() const {
  std::string text = table_head();
  const auto row = [&text](std::string_view category, std::string_view owner, MemoryUsage usage) {
    text += fmt::format("{:<16} {:<28} {:>12} {:>12}\n", category, owner,
                        format_bytes(usage.current), format_bytes(usage.peak));
  };
  for (const Line& line : lines()) row(memory_category_name(line.category), line.owner, line.usage);
  for (int c = 0; c < kMemoryCategories; ++c) {
    const auto category = static_cast<MemoryCategory>(c);
    if (usage(category).peak > 0) row(memory_category_name(category), "(all)", usage(category));
  }
  row("total", "", total());
  return text;
}

std::string with_ledger(const std::string& message, const MemoryLedger& ledger) {
  if (message.find(table_head()) != std::string::npos) return message;
  return message + "\n" + ledger.table();
}

void MemoryLedger::reset_peaks() {
  const std::lock_guard lock(entries_->mutex);
  for (const auto& [key, entry] : entries_->by_owner) entry->peak = entry->current.load();
  for (std::size_t c = 0; c < by_category_.size(); ++c)
    by_category_peak_[c] = by_category_[c].load();
  total_peak_ = total_.load();
}

std::unique_ptr<Allocator> make_meta_allocator() { return std::make_unique<MetaAllocator>(); }

std::string format_bytes(std::int64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : 1, kUnits[unit]);
}

}  // namespace tessera
