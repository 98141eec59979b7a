#include "tests/support/paths.h"

#include <cstdlib>

namespace tessera::test {
namespace {

/// The folder that the environment variable names, else the one of the build.
std::string path_in(const char* variable, const char* built, const std::string& relative) {
  const char* folder = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe)
  if (folder == nullptr || *folder == '\0') folder = built;
  return relative.empty() ? folder : std::string(folder) + "/" + relative;
}

}  // namespace

std::string source_path(const std::string& relative) {
  return path_in("TESSERA_TEST_SOURCES", TESSERA_SOURCE_DIR, relative);
}

std::string build_path(const std::string& relative) {
  return path_in("TESSERA_TEST_BUILD", TESSERA_BINARY_DIR, relative);
}

}  // namespace tessera::test
