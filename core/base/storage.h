#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/context.h"

namespace tessera {

/// A block of memory of one context, booked in its ledger. Shared by all tensors that view it.
///
/// Its memory can be given back and taken again while views stay (`release`, `materialize`): the
/// gathered parameters of a unit live in such a storage. Views of a released storage throw when
/// they are read. Not thread-safe but for destruction.
class Storage {
 public:
  /// Takes `bytes` from the context's allocator. @throws OutOfMemory
  static std::shared_ptr<Storage> allocate(std::shared_ptr<Context> context, std::size_t bytes,
                                           MemoryCategory category, std::string_view owner);
  /// Like allocate, but takes no memory until materialize().
  static std::shared_ptr<Storage> reserve(std::shared_ptr<Context> context, std::size_t bytes,
                                          MemoryCategory category, std::string_view owner);
  /// A window on memory that `keep_alive` owns (a mapped file, another storage); books nothing.
  static std::shared_ptr<Storage> wrap(std::shared_ptr<Context> context, void* data,
                                       std::size_t bytes, std::shared_ptr<void> keep_alive);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  const std::shared_ptr<Context>& context() const { return context_; }
  std::size_t bytes() const { return bytes_; }
  bool is_materialized() const { return materialized_; }
  /// @throws InternalError naming the owner if released
  void* data() const {
    if (!materialized_) [[unlikely]]
      throw_released();
    return data_;
  }
  /// Takes memory if there is none; contents undefined. Does not change the version.
  void materialize();
  /// Gives the memory back. Does not change the version: who materializes it again restores it.
  void release() noexcept;

  /// Counts changes of the contents; saved tensors compare it. Every in-place operation bumps it.
  std::uint64_t version() const { return version_; }
  void bump_version() { ++version_; }

 private:
  Storage(std::shared_ptr<Context> context, std::size_t bytes);
  [[noreturn]] void throw_released() const;
  std::shared_ptr<Context> context_;
  std::size_t bytes_ = 0;
  void* data_ = nullptr;
  MemoryLedger::Entry* entry_ = nullptr;  // null: memory of somebody else
  std::shared_ptr<void> keep_alive_;
  bool materialized_ = false;
  std::uint64_t version_ = 0;
};

}  // namespace tessera
