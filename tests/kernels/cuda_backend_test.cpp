#include <doctest/doctest.h>

#include <string>

#include "core/base/context.h"
#include "core/base/device_backend.h"
#include "core/base/error.h"
#include "tests/support/paths.h"

namespace tessera::test {
namespace {

TEST_CASE("the plugin opens a GPU, or reports why there is none") {
  const std::string plugin = cuda_plugin();
  std::string why;
  try {
    const auto context = Context::create({.device = {DeviceType::CUDA, 0}, .plugin = plugin});
    CHECK_FALSE(context->backend().description().empty());
    CHECK(context->device().str() == "cuda:0");
  } catch (const Unsupported& error) {
    why = error.what();
    CAPTURE(why);
    CHECK(why.find("no GPU can be used") != std::string::npos);
    CHECK_THROWS_AS(count_devices(plugin), Unsupported);
  }
  CHECK_THROWS_AS(Context::create({.device = {DeviceType::CUDA, 99}, .plugin = plugin}),
                  Unsupported);
}

}  // namespace
}  // namespace tessera::test
