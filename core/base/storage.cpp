#include "core/base/storage.h"

#include "core/base/device_backend.h"
#include "core/base/error.h"
#include "core/base/memory.h"

namespace tessera {

Storage::Storage(std::shared_ptr<Context> context, std::size_t bytes)
    : context_(std::move(context)), bytes_(bytes), allocator_(&context_->allocator()) {}

Storage::Storage(std::shared_ptr<Context> context, std::size_t bytes, MemoryLedger& ledger,
                 MemoryCategory category, std::string_view owner)
    : Storage(std::move(context), bytes) {
  ledger_ = &ledger;
  entry_ = &ledger.entry(category, owner);
}

std::shared_ptr<Storage> Storage::reserve(std::shared_ptr<Context> context, std::size_t bytes,
                                          MemoryCategory category, std::string_view owner) {
  MemoryLedger& ledger = context->ledger();
  return std::shared_ptr<Storage>(new Storage(std::move(context), bytes, ledger, category, owner));
}

std::shared_ptr<Storage> Storage::allocate(std::shared_ptr<Context> context, std::size_t bytes,
                                           MemoryCategory category, std::string_view owner) {
  auto storage = reserve(std::move(context), bytes, category, owner);
  storage->materialize();
  return storage;
}

std::shared_ptr<Storage> Storage::allocate_on_host(std::shared_ptr<Context> context,
                                                   std::size_t bytes, MemoryCategory category,
                                                   std::string_view owner) {
  MemoryLedger& ledger = context->host_ledger();
  std::shared_ptr<Storage> storage(new Storage(std::move(context), bytes, ledger, category, owner));
  if (storage->context_->device().type == DeviceType::CUDA)
    storage->allocator_ = &storage->context_->backend().host_allocator();
  storage->materialize();
  return storage;
}

std::shared_ptr<Storage> Storage::wrap(std::shared_ptr<Context> context, void* data,
                                       std::size_t bytes, std::shared_ptr<void> keep_alive) {
  std::shared_ptr<Storage> storage(new Storage(std::move(context), bytes));
  storage->data_ = data;
  storage->keep_alive_ = std::move(keep_alive);
  storage->materialized_ = storage->available_ = true;
  return storage;
}

Storage::~Storage() { release(); }

void Storage::materialize() {
  if (materialized_) return;
  try {
    ledger_->require_room(static_cast<std::int64_t>(bytes_));
    data_ = allocator_->allocate(bytes_);
  } catch (const OutOfMemory& error) {
    throw OutOfMemory("{} for {} ({}) on {}\n{}", error.what(), entry_->owner,
                      memory_category_name(entry_->category),
                      allocator_ == &context_->allocator() ? context_->device().str() : "the host",
                      ledger_->table());
  }
  ledger_->book(*entry_, static_cast<std::int64_t>(bytes_));
  materialized_ = available_ = true;
}

void Storage::release() noexcept {
  if (!materialized_ || entry_ == nullptr) return;
  allocator_->deallocate(data_, bytes_);
  ledger_->book(*entry_, -static_cast<std::int64_t>(bytes_));
  data_ = nullptr;
  materialized_ = available_ = false;
}

void Storage::own_supplier(std::shared_ptr<StorageSupplier> supplier) {
  supplier_ = supplier.get();
  owned_supplier_ = std::move(supplier);
}

void Storage::drop_owned_supplier() {
  if (owned_supplier_) supplier_ = nullptr;
  owned_supplier_.reset();
}

void Storage::set_saved_as(std::shared_ptr<Storage> other) {
  saved_as_ = std::move(other);
  saved_version_ = version_;
}

void Storage::supply() {
  if (supplier_ != nullptr) supplier_->supply(*this);
  drop_owned_supplier();
  require<InternalError>(available_, "memory of {} ({}) was read after its release",
                         entry_ != nullptr ? entry_->owner : "a wrapped buffer",
                         format_bytes(static_cast<std::int64_t>(bytes_)));
}

}  // namespace tessera
