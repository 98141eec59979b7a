#include "kernels/product_library.h"

#include <cstdlib>
#include <string_view>

#include "core/base/error.h"
#include "core/base/plugin.h"

namespace tessera::kernels {
namespace {

ProductLibrary choose() {
  ProductLibrary eigen{"Eigen", nullptr, ""};
  constexpr const char* kVariable = "TESSERA_ONEDNN_PLUGIN";
  constexpr std::string_view kFile = "libtessera_onednn.so";
  const char* named = std::getenv(kVariable);  // NOLINT(concurrency-mt-unsafe)
  if (named != nullptr && std::string_view(named) == "off") return eigen;
  if (Plugin::locate(kFile, kVariable).empty()) return eigen;
  try {
    const Plugin plugin("oneDNN", kFile, kVariable, "");
    plugin.require_version("tessera_onednn_plugin_version", kProductPluginVersion);
    return {plugin.symbol<const char* (*)()>("tessera_onednn_name")(),
            plugin.symbol<Sgemm>("tessera_onednn_sgemm"), ""};
  } catch (const Unsupported& error) {
    eigen.problem = error.what();
    return eigen;
  }
}

}  // namespace

const ProductLibrary& product_library() {
  static const ProductLibrary library = choose();
  return library;
}

}  // namespace tessera::kernels
