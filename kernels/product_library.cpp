#include "kernels/product_library.h"

#include <cstdlib>
#include <string_view>

#include "core/base/error.h"
#include "core/base/plugin.h"

namespace tessera::kernels {
namespace {

ProductLibrary choose() {
  ProductLibrary eigen{.name = "Eigen", .problem = ""};
  constexpr const char* kVariable = "TESSERA_ONEDNN_PLUGIN";
  constexpr std::string_view kFile = "libtessera_onednn.so";
  const char* named = std::getenv(kVariable);  // NOLINT(concurrency-mt-unsafe)
  if (named != nullptr && std::string_view(named) == "off") return eigen;
  if (Plugin::locate(kFile, kVariable).empty()) return eigen;
  try {
    const Plugin plugin("oneDNN", kFile, kVariable, "");
    plugin.require_version("tessera_onednn_plugin_version", kProductPluginVersion);
    return {
        .name = plugin.symbol<const char* (*)()>("tessera_onednn_name")(),
        .problem = "",
        .has_bf16 = plugin.symbol<bool (*)()>("tessera_onednn_has_bf16")(),
        .has_amx = plugin.symbol<bool (*)()>("tessera_onednn_has_amx")(),
        .supports = plugin.symbol<bool (*)(const LibraryProduct::Form&)>("tessera_onednn_supports"),
        .multiply = plugin.symbol<bool (*)(const LibraryProduct&)>("tessera_onednn_multiply")};
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

void multiply_by_library(const LibraryProduct& product) {
  const ProductLibrary& library = product_library();
  if (!library.multiply(product))
    throw InternalError("{} failed in a product of {} x {} x {}", library.name, product.form.m,
                        product.form.n, product.form.k);
}

}  // namespace tessera::kernels
