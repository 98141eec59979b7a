#pragma once

#include <dlfcn.h>

#include <map>
#include <string>
#include <string_view>

namespace tessera {

class Context;

/// Looks up kernels of the enclosing plugin: functions named tessera_kernel_<name>.
class PluginKernels {
 public:
  /// @return false if there is no such kernel
  bool run(std::string_view name, Context& context, const void* args) {
    using Kernel = void (*)(Context&, const void*);
    auto found = kernels_.find(name);
    if (found == kernels_.end()) found = kernels_.emplace(name, look_up(name)).first;
    if (found->second == nullptr) return false;
    reinterpret_cast<Kernel>(found->second)(context, args);
    return true;
  }

 private:
  static void* look_up(std::string_view name) {
    Dl_info self{};
    if (::dladdr(reinterpret_cast<void*>(&look_up), &self) == 0) return nullptr;
    void* library = ::dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return nullptr;
    void* found = ::dlsym(library, ("tessera_kernel_" + std::string(name)).c_str());
    ::dlclose(library);  // the program holds another handle
    return found;
  }

  std::map<std::string, void*, std::less<>> kernels_;
};

}  // namespace tessera
