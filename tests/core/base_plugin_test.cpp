#include <doctest/doctest.h>

#include "core/base/error.h"
#include "core/base/plugin.h"
#include "tests/support/check_throws.h"

namespace tessera {
namespace {

TEST_CASE("a missing plugin: the message says where to put it and how to name it") {
  CHECK(Plugin::locate("libtessera_absent.so", "TESSERA_ABSENT_PLUGIN").empty());
  CHECK_THROWS_HOLDING(Unsupported,
                       "no CUDA backend: libtessera_absent.so is neither next to the program, nor "
                       "in ../lib/tessera, nor in the dynamic linker's directories",
                       Plugin("CUDA backend", "libtessera_absent.so", "TESSERA_ABSENT_PLUGIN", ""));
  CHECK_THROWS_HOLDING(Unsupported,
                       "or set TESSERA_ABSENT_PLUGIN or the plugin option (ContextOptions::plugin) "
                       "to its path",
                       Plugin("CUDA backend", "libtessera_absent.so", "TESSERA_ABSENT_PLUGIN", ""));
}

TEST_CASE("plugins are found where the dynamic linker searches") {
  const std::string found = Plugin::locate("libc.so.6", "TESSERA_ABSENT_PLUGIN");
  CHECK(found.ends_with("/libc.so.6"));
  const Plugin libc("C library", "libc.so.6", "TESSERA_ABSENT_PLUGIN", "");
  CHECK(libc.symbol<int (*)()>("getpid")() > 0);
}

}  // namespace
}  // namespace tessera
