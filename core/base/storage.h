#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/context.h"
#include "core/base/memory_category.h"

namespace tessera {

struct MemoryEntry;
class Storage;

/// Fills a storage when its contents are needed; see Storage::set_supplier().
class StorageSupplier {
 public:
  virtual ~StorageSupplier() = default;
  /// Makes the storage available. @throws whatever keeps it from doing so
  virtual void supply(Storage& storage) = 0;
};

/// A block of memory of one context, counted in its ledger. Shared by all tensors that view it.
///
/// Memory can be released and materialized again while views exist, as for a unit's gathered
/// parameters. Reading a view of a released storage calls its supplier, or throws. Only destruction
/// is thread-safe.
class Storage {
 public:
  /// Allocates from the context's allocator. @throws OutOfMemory
  static std::shared_ptr<Storage> allocate(std::shared_ptr<Context> context, std::size_t bytes,
                                           MemoryCategory category, std::string_view owner);
  /// Like allocate(), but in host memory, for copies of device memory, and counted in the
  /// host_ledger(). A CUDA context uses its backend's host_allocator(). Any thread.
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
  /// Address of the contents. Calls the supplier if they are not available.
  /// @throws InternalError naming the owner if they are not available and there is no supplier
  void* data() {
    if (!available_) [[unlikely]]
      supply();
    return data_;
  }
  /// Sets who makes the contents available when data() is called without them; must outlive the
  /// storage or be reset to null.
  void set_supplier(StorageSupplier* supplier) { supplier_ = supplier; }
  /// The same with a supplier that the storage owns until it has supplied the contents, once.
  void own_supplier(std::shared_ptr<StorageSupplier> supplier);
  StorageSupplier* owned_supplier() const { return owned_supplier_.get(); }
  /// Frees it. Contents that are not available then stay so.
  void drop_owned_supplier();
  /// Marks the contents of a materialized storage as incomplete, or complete again.
  void set_available(bool available) { available_ = materialized_ && available; }
  bool is_available() const { return available_; }
  /// Allocates memory unless present; contents undefined. Does not change the version.
  void materialize();
  /// Frees the memory. Does not change the version, because the caller restores the contents after
  /// materialize().
  void release() noexcept;

  /// A storage that has, or computes when it is read, the contents that this one has now. Saved tensors hold it in
  /// this one's place, whose memory is then freed with its last handle.
  void set_saved_as(std::shared_ptr<Storage> other);
  /// Null: none, or this one was changed in place since.
  std::shared_ptr<Storage> saved_as() const {
    return version_ == saved_version_ ? saved_as_ : nullptr;
  }

  /// Number of in-place changes, which saved tensors compare.
  std::uint64_t version() const { return version_; }
  void bump_version() { ++version_; }

 private:
  Storage(std::shared_ptr<Context> context, std::size_t bytes);
  Storage(std::shared_ptr<Context> context, std::size_t bytes, MemoryLedger& ledger,
          MemoryCategory category, std::string_view owner);
  void supply();
  std::shared_ptr<Context> context_;
  std::size_t bytes_ = 0;
  Allocator* allocator_;
  void* data_ = nullptr;
  MemoryLedger* ledger_ = nullptr;  // null: not counted
  MemoryEntry* entry_ = nullptr;
  std::shared_ptr<void> keep_alive_;
  StorageSupplier* supplier_ = nullptr;
  std::shared_ptr<StorageSupplier> owned_supplier_;
  bool materialized_ = false;
  bool available_ = false;  // implies materialized_
  std::uint64_t version_ = 0;
  std::shared_ptr<Storage> saved_as_;
  std::uint64_t saved_version_ = 0;  // when saved_as_ was set
};

}  // namespace tessera
