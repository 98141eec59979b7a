#include "tests/support/paths.h"

namespace tessera::test {

// Only this file is compiled with the paths, so that other checkouts share the compiler cache.
std::string source_path(const std::string& relative) {
  return relative.empty() ? TESSERA_SOURCE_DIR : TESSERA_SOURCE_DIR "/" + relative;
}

std::string build_path(const std::string& relative) {
  return relative.empty() ? TESSERA_BINARY_DIR : TESSERA_BINARY_DIR "/" + relative;
}

}  // namespace tessera::test
