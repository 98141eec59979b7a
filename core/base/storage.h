#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/context.h"

namespace tessera {

/// A block of memory of one context, counted in its ledger. Shared by all tensors that view it.
///
/// Memory can be released and materialized again while views exist, as for a unit's gathered
/// parameters. Reading a view of a released storage throws. Only destruction is thread-safe.
class Storage {
 public:
  /// Allocates from the context's allocator. @throws OutOfMemory
  static std::shared_ptr<Storage> allocate(std::shared_ptr<Context> context, std::size_t bytes,
                                           MemoryCategory category, std::string_view owner);
  /// Like allocate(), but in host memory, for copies of device memory. A CUDA context uses its
  /// backend's host_allocator(). Any thread.
  static std::shared_ptr<Storage> allocate_on_host(std::shared_ptr<Context> context,
                                                   std::size_t bytes, MemoryCategory category,
                                                   std::string_view owner);
  /// Like allocate(), without memory until materialize().
  static std::shared_ptr<Storage> reserve(std::shared_ptr<Context> context, std::size_t bytes,
                                          MemoryCategory category, std::string_view owner);
  /// A view of memory that `keep_alive` owns, such as a mapped file; the ledger does not count it.
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
  /// Allocates memory unless present; contents undefined. Does not change the version.
  void materialize();
  /// Frees the memory. Does not change the version, because the caller restores the contents after
  /// materialize().
  void release() noexcept;

  /// Number of in-place changes, which saved tensors compare.
  std::uint64_t version() const { return version_; }
  void bump_version() { ++version_; }

 private:
  Storage(std::shared_ptr<Context> context, std::size_t bytes);
  [[noreturn]] void throw_released() const;
  std::shared_ptr<Context> context_;
  std::size_t bytes_ = 0;
  Allocator* allocator_;
  void* data_ = nullptr;
  MemoryLedger::Entry* entry_ = nullptr;  // null: not counted
  std::shared_ptr<void> keep_alive_;
  bool materialized_ = false;
  std::uint64_t version_ = 0;
};

}  // namespace tessera
