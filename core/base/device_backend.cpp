#include "core/base/device_backend.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include "core/base/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFileName = "libtessera_cuda.so";

std::string find_plugin() {
  const char* named = std::getenv("TESSERA_CUDA_PLUGIN");  // NOLINT(concurrency-mt-unsafe)
  if (named != nullptr && *named != '\0') return named;
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  const fs::path beside = program / kFileName;
  const fs::path installed = program.parent_path() / "lib" / "tessera" / kFileName;
  if (fs::exists(beside, ignored)) return beside.string();
  if (fs::exists(installed, ignored)) return installed.string();
  throw Unsupported(
      "no CUDA backend: neither {} nor {} exists; build tessera where nvcc is installed, or use "
      "the cpu",
      beside.string(), installed.string());
}

template <typename F>
F symbol(void* library, const std::string& path, const char* name) {
  void* found = ::dlsym(library, name);
  require<Unsupported>(found != nullptr, "{} is no tessera plugin: it has no {}", path, name);
  return reinterpret_cast<F>(found);
}

// A loaded plugin, and the file that it is.
struct Plugin {
  void* library = nullptr;
  std::string path;
};

Plugin load_plugin(const std::string& plugin) {
  const std::string path = plugin.empty() ? find_plugin() : plugin;
  // Never unloaded: errors and objects of the plugin may outlive any context.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    throw Unsupported("the CUDA backend can't be loaded: {}", why == nullptr ? path : why);
  }
  const int version = symbol<int (*)()>(library, path, "tessera_plugin_version")();
  require<Unsupported>(version == kPluginVersion,
                       "{} speaks version {} of the plugin interface, this program version {}",
                       path, version, kPluginVersion);
  return {library, path};
}

}  // namespace

std::unique_ptr<DeviceBackend> load_device_backend(int index, const std::string& plugin) {
  const Plugin loaded = load_plugin(plugin);
  return std::unique_ptr<DeviceBackend>(
      symbol<DeviceBackend* (*)(int)>(loaded.library, loaded.path, "tessera_open_device")(index));
}

int count_devices(const std::string& plugin) {
  const Plugin loaded = load_plugin(plugin);
  return symbol<int (*)()>(loaded.library, loaded.path, "tessera_device_count")();
}

}  // namespace tessera
