// The plugin that runs the CUDA kernels as fibers: host memory, and every call done when it
// returns.
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "core/base/device_backend.h"
#include "core/base/error.h"

namespace tessera::fiber {
namespace {

class Backend final : public DeviceBackend {
 public:
  std::string description() const override { return "fibers on the host"; }
  Allocator& allocator() override { return *allocator_; }

  bool run_kernel(std::string_view name, Context& context, const void* args) override {
    using Kernel = void (*)(Context&, const void*);
    auto found = kernels_.find(name);
    if (found == kernels_.end()) {
      Dl_info self{};
      ::dladdr(reinterpret_cast<void*>(&anchor), &self);
      void* library = ::dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
      void* symbol = ::dlsym(library, ("tessera_kernel_" + std::string(name)).c_str());
      found = kernels_.emplace(name, symbol).first;
    }
    if (found->second == nullptr) return false;
    reinterpret_cast<Kernel>(found->second)(context, args);
    return true;
  }

  void copy_from_host(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void copy_to_host(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void synchronize() override {}
  void* stream() override { return nullptr; }

 private:
  static void anchor() {}

  std::unique_ptr<Allocator> allocator_ = make_cpu_allocator();
  std::map<std::string, void*, std::less<>> kernels_;
};

}  // namespace
}  // namespace tessera::fiber

extern "C" {
__attribute__((visibility("default"))) int tessera_plugin_version() {
  return tessera::kPluginVersion;
}
__attribute__((visibility("default"))) tessera::DeviceBackend* tessera_open_device(int index) {
  tessera::require<tessera::Unsupported>(
      index >= 0 && index < 8, "device cuda:{} does not exist; there are 8 of fibers", index);
  return new tessera::fiber::Backend();
}
}
