#include "core/base/context.h"

#include "core/base/error.h"

namespace tessera {

std::shared_ptr<Context> Context::create(const ContextOptions& options) {
  require<Unsupported>(options.device.type != DeviceType::CUDA,
                       "device {} asked for, but this build has no CUDA backend; use cpu",
                       options.device.str());
  return std::shared_ptr<Context>(new Context(options));
}

Context::Context(const ContextOptions& options)
    : options_(options),
      allocator_(options.device.type == DeviceType::Meta ? make_meta_allocator()
                                                         : make_cpu_allocator()),
      threads_(options.threads) {}

Context::~Context() = default;

}  // namespace tessera
