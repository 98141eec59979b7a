#include "comm/nccl.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include "core/base/context.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFileName = "libtessera_nccl.so";

std::string find_plugin() {
  const char* named = std::getenv("TESSERA_NCCL_PLUGIN");  // NOLINT(concurrency-mt-unsafe)
  if (named != nullptr && *named != '\0') return named;
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  const fs::path beside = program / kFileName;
  const fs::path installed = program.parent_path() / "lib" / "tessera" / kFileName;
  if (fs::exists(beside, ignored)) return beside.string();
  if (fs::exists(installed, ignored)) return installed.string();
  throw Unsupported(
      "no NCCL backend: neither {} nor {} exists; build tessera where nvcc and NCCL are installed",
      beside.string(), installed.string());
}

template <typename F>
F symbol(void* library, const std::string& path, const char* name) {
  void* found = ::dlsym(library, name);
  require<Unsupported>(found != nullptr, "{} is no tessera NCCL plugin: it has no {}", path, name);
  return reinterpret_cast<F>(found);
}

}  // namespace

std::unique_ptr<NcclDriver> open_nccl(Context& context, const std::string& plugin) {
  const std::string path = plugin.empty() ? find_plugin() : plugin;
  // Never unloaded: its errors and threads may outlive any communicator.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    throw Unsupported("the NCCL backend can't be loaded: {}", why == nullptr ? path : why);
  }
  const int version = symbol<int (*)()>(library, path, "tessera_nccl_plugin_version")();
  require<Unsupported>(version == kNcclPluginVersion,
                       "{} speaks version {} of the NCCL plugin interface, this program version {}",
                       path, version, kNcclPluginVersion);
  return std::unique_ptr<NcclDriver>(symbol<NcclDriver* (*)(int, void*, const char*)>(
      library, path, "tessera_open_nccl")(context.device().index, context.backend().stream(),
                                          context.backend().device_id().c_str()));
}

}  // namespace tessera::comm
