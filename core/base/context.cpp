#include "core/base/context.h"

#include "core/base/error.h"

namespace tessera {

namespace {

std::unique_ptr<Allocator> make_allocator(DeviceType type) {
  switch (type) {
    case DeviceType::CPU:
      return make_cpu_allocator();
    case DeviceType::Meta:
      return make_meta_allocator();
    case DeviceType::CUDA:
      break;
  }
  return nullptr;
}

}  // namespace

std::shared_ptr<Context> Context::create(const ContextOptions& options) {
  return std::shared_ptr<Context>(new Context(options));
}

Context::Context(const ContextOptions& options)
    : options_(options),
      backend_(options.device.type == DeviceType::CUDA
                   ? load_device_backend(options.device.index, options.plugin)
                   : nullptr),
      allocator_(make_allocator(options.device.type)),
      threads_(options.threads) {}

DeviceBackend& Context::backend() {
  require<InternalError>(backend_ != nullptr, "{} has no device backend", device().str());
  return *backend_;
}

Context::~Context() = default;

}  // namespace tessera
