#include "core/base/device_backend.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>

#include "core/base/error.h"
#include "core/base/plugin.h"

namespace tessera {
namespace {

constexpr const char* kFile = "libtessera_cuda.so";
constexpr const char* kVariable = "TESSERA_CUDA_PLUGIN";

// Where there is no trace of a driver, the backend isn't loaded: its libraries would take 130 MiB.
bool may_have_driver() {
  if (::dlopen("libcuda.so.1", RTLD_LAZY) != nullptr) return true;
  // A driver that only the backend's own search path leads to, or that is broken; the backend says so.
  std::error_code ignored;
  return std::ranges::any_of(
      std::array{"/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/nvmap"},
      [&](const char* path) { return std::filesystem::exists(path, ignored); });
}

Plugin load(const std::string& path) {
  const char* const named = std::getenv(kVariable);  // NOLINT(concurrency-mt-unsafe)
  if (path.empty() && (named == nullptr || *named == '\0') && has_device_backend())
    require<Unsupported>(may_have_driver(), "no GPU can be used: no NVIDIA driver is installed");
  Plugin plugin("CUDA backend", kFile, kVariable, path);
  plugin.require_version("tessera_plugin_version", kPluginVersion);
  return plugin;
}

}  // namespace

std::unique_ptr<DeviceBackend> load_device_backend(int index, const std::string& plugin) {
  return std::unique_ptr<DeviceBackend>(
      load(plugin).symbol<DeviceBackend* (*)(int)>("tessera_open_device")(index));
}

bool has_device_backend() { return !Plugin::locate(kFile, kVariable).empty(); }

int count_devices(const std::string& plugin) {
  return load(plugin).symbol<int (*)()>("tessera_device_count")();
}

}  // namespace tessera
