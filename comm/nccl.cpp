#include "comm/nccl.h"

#include "core/base/context.h"
#include "core/base/device_backend.h"
#include "core/base/plugin.h"

namespace tessera::comm {

std::unique_ptr<NcclDriver> open_nccl(Context& context, const std::string& path) {
  const Plugin plugin("NCCL backend", "libtessera_nccl.so", "TESSERA_NCCL_PLUGIN", path);
  plugin.require_version("tessera_nccl_plugin_version", kNcclPluginVersion);
  return std::unique_ptr<NcclDriver>(plugin.symbol<NcclDriver* (*)(int, void*, const char*)>(
      "tessera_open_nccl")(context.device().index, context.backend().stream(),
                           context.backend().device_id().c_str()));
}

}  // namespace tessera::comm
