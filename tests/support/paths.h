#pragma once

#include <string>

namespace tessera::test {

/// Absolute path of a file in the checkout, e.g. "tests/golden/gpt2-tiny". TESSERA_TEST_SOURCES names another
/// checkout, and TESSERA_TEST_BUILD another build folder, for tests that run where they were not built.
std::string source_path(const std::string& relative = {});

/// Absolute path of a build output, e.g. "bin/tessera".
std::string build_path(const std::string& relative = {});

inline std::string tessera_program() { return build_path("bin/tessera"); }

/// The plugin of the CUDA backend, if this build has it.
inline std::string cuda_plugin() { return build_path("bin/libtessera_cuda.so"); }

/// The plugin that runs CUDA kernels on the host.
inline std::string fiber_plugin() {
  return build_path("tests/support/fiber/libtessera_cuda_fiber.so");
}

}  // namespace tessera::test
