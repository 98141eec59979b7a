#include <doctest/doctest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>

#include "tests/support/paths.h"

namespace tessera::test {
namespace {

std::set<std::string> kernels_of(const std::string& plugin) {
  const std::string command = "nm --dynamic --defined-only " + plugin;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  REQUIRE(pipe != nullptr);
  const std::string prefix = "tessera_kernel_";
  std::set<std::string> names;
  std::array<char, 512> line;
  while (std::fgets(line.data(), line.size(), pipe.get()) != nullptr) {
    const std::string symbol(line.data());
    const auto at = symbol.find(" " + prefix);
    if (at == std::string::npos) continue;
    const auto begin = at + 1 + prefix.size();
    names.insert(symbol.substr(begin, symbol.find('\n') - begin));
  }
  return names;
}

// Kernel tests also run on fibers, so that CPU-only kernels fail there.
TEST_CASE("every fiber kernel is called by a test") {
  std::string tests;
  for (const auto& entry : std::filesystem::directory_iterator(source_path("tests/kernels"))) {
    std::ostringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    tests += text.str();
  }
  const auto kernels = kernels_of(fiber_plugin());
  CHECK(kernels.size() >= 20);
  for (const std::string& kernel : kernels) {
    CAPTURE(kernel);
    CHECK(tests.find(kernel + "(") != std::string::npos);
  }
}

TEST_CASE("the CUDA backend has all fiber kernels, and the fused products") {
  if (!std::filesystem::exists(cuda_plugin())) return;  // built without nvcc
  auto kernels = kernels_of(fiber_plugin());
  kernels.insert("matmul_fused");
  CHECK(kernels_of(cuda_plugin()) == kernels);
}

}  // namespace
}  // namespace tessera::test
