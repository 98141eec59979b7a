#include <dlfcn.h>
#include <doctest/doctest.h>

#include <string>

#include "core/base/device_backend.h"

namespace tessera::test {
namespace {

TEST_CASE("built plugins load completely, and report their version") {
  for (const std::string plugin : {TESSERA_PLUGIN_FILES}) {
    CAPTURE(plugin);
    void* library = dlopen(plugin.c_str(), RTLD_NOW | RTLD_LOCAL);
    const std::string why = library == nullptr ? dlerror() : "";
    REQUIRE(why == "");
    const std::string file = plugin.substr(plugin.rfind('/'));
    const auto is = [&](const char* name) { return file.find(name) != std::string::npos; };
    if (is("nccl")) continue;  // reports NCCL's version
    using Version = int (*)();
    const auto version = reinterpret_cast<Version>(
        dlsym(library, is("cudnn") ? "tessera_cudnn_plugin_version" : "tessera_plugin_version"));
    const bool found = version != nullptr;
    REQUIRE(found);
    CHECK(version() == kPluginVersion);
  }
}

}  // namespace
}  // namespace tessera::test
