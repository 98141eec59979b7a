#include "core/base/device_backend.h"

#include "core/base/plugin.h"

namespace tessera {
namespace {

constexpr const char* kFile = "libtessera_cuda.so";
constexpr const char* kVariable = "TESSERA_CUDA_PLUGIN";

Plugin load(const std::string& path) {
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
