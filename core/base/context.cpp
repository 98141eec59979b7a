#include "core/base/context.h"

#include <algorithm>
#include <unordered_map>

#include "core/base/device_backend.h"
#include "core/base/error.h"
#include "core/base/memory.h"
#include "core/base/rng.h"
#include "core/base/thread_pool.h"

namespace tessera {

struct Context::Resources {
  explicit Resources(const ContextOptions& options)
      : backend(options.device.type == DeviceType::CUDA
                    ? load_device_backend(options.device.index, options.plugin)
                    : nullptr),
        allocator(backend                                  ? nullptr
                  : options.device.type == DeviceType::CPU ? make_cpu_allocator()
                                                           : make_meta_allocator()),
        threads(options.threads) {}

  MemoryLedger ledger, host_ledger;
  std::unique_ptr<DeviceBackend> backend;  // CUDA only; other devices use allocator
  std::unique_ptr<Allocator> allocator;
  ThreadPool threads;
  std::unordered_map<std::string, std::int64_t> planned_libraries;
};

std::shared_ptr<Context> Context::create(const ContextOptions& options) {
  return std::shared_ptr<Context>(new Context(options));
}

Context::Context(const ContextOptions& options)
    : options_(options), resources_(std::make_unique<Resources>(options)) {}

ThreadPool& Context::threads() { return resources_->threads; }

MemoryLedger& Context::ledger() { return resources_->ledger; }

const MemoryLedger& Context::ledger() const { return resources_->ledger; }

MemoryLedger& Context::host_ledger() {
  return target().type == DeviceType::CUDA ? resources_->host_ledger : resources_->ledger;
}

Allocator& Context::allocator() {
  return resources_->backend ? resources_->backend->allocator() : *resources_->allocator;
}

DeviceBackend& Context::backend() {
  require<InternalError>(resources_->backend != nullptr, "{} has no device backend",
                         device().str());
  return *resources_->backend;
}

DeviceLimits Context::limits() const {
  return resources_->backend ? resources_->backend->limits() : options_.planned_limits;
}

const std::unordered_map<std::string, std::int64_t>& Context::planned_libraries() const {
  return resources_->planned_libraries;
}

Context::~Context() {
  if (rng_step_ != nullptr) allocator().deallocate(rng_step_, sizeof(RngStep));
}

void Context::plan_library(const std::string& name, std::int64_t bytes) {
  std::int64_t& most = resources_->planned_libraries[name];
  most = std::max(most, bytes);
}

void Context::set_rng_step(const RngStep& step) {
  auto& entry = resources_->ledger.entry(MemoryCategory::Data, "random numbers");
  if (entry.current == 0) {
    rng_step_ = static_cast<RngStep*>(allocator().allocate(sizeof(RngStep)));
    resources_->ledger.book(entry, sizeof(RngStep));
  }
  if (device().type == DeviceType::Meta) return;
  if (resources_->backend)
    resources_->backend->copy_from_host(rng_step_, &step, sizeof(step));
  else
    *rng_step_ = step;
}

const RngStep* Context::rng_step() {
  if (rng_step_ == nullptr) set_rng_step({});
  return rng_step_;
}

}  // namespace tessera
