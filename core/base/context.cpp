#include "core/base/context.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/base/rng.h"

namespace tessera {

std::shared_ptr<Context> Context::create(const ContextOptions& options) {
  return std::shared_ptr<Context>(new Context(options));
}

Context::Context(const ContextOptions& options)
    : options_(options),
      backend_(options.device.type == DeviceType::CUDA
                   ? load_device_backend(options.device.index, options.plugin)
                   : nullptr),
      allocator_(backend_                                 ? nullptr
                 : options.device.type == DeviceType::CPU ? make_cpu_allocator()
                                                          : make_meta_allocator()),
      threads_(options.threads) {}

DeviceBackend& Context::backend() {
  require<InternalError>(backend_ != nullptr, "{} has no device backend", device().str());
  return *backend_;
}

Context::~Context() {
  if (rng_step_ != nullptr) allocator().deallocate(rng_step_, sizeof(RngStep));
}

void Context::plan_library(const std::string& name, std::int64_t bytes) {
  std::int64_t& most = planned_libraries_[name];
  most = std::max(most, bytes);
}

void Context::set_rng_step(const RngStep& step) {
  auto& entry = ledger_.entry(MemoryCategory::Data, "random numbers");
  if (entry.current == 0) {
    rng_step_ = static_cast<RngStep*>(allocator().allocate(sizeof(RngStep)));
    ledger_.book(entry, sizeof(RngStep));
  }
  if (device().type == DeviceType::Meta) return;
  if (backend_)
    backend_->copy_from_host(rng_step_, &step, sizeof(step));
  else
    *rng_step_ = step;
}

const RngStep* Context::rng_step() {
  if (rng_step_ == nullptr) set_rng_step({});
  return rng_step_;
}

}  // namespace tessera
