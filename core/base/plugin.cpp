#include "core/base/plugin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include "core/base/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string find_file(std::string_view what, std::string_view file, const char* variable) {
  const char* named = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe)
  if (named != nullptr && *named != '\0') return named;
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  const fs::path beside = program / file;
  const fs::path installed = program.parent_path() / "lib" / "tessera" / file;
  if (fs::exists(beside, ignored)) return beside.string();
  if (fs::exists(installed, ignored)) return installed.string();
  throw Unsupported("no {}: neither {} nor {} exists; build tessera where its libraries are", what,
                    beside.string(), installed.string());
}

}  // namespace

Plugin::Plugin(std::string_view what, std::string_view file, const char* variable,
               const std::string& path)
    : path_(path.empty() ? find_file(what, file, variable) : path),
      library_(::dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (library_ != nullptr) return;
  const char* why = ::dlerror();
  throw Unsupported("the {} can't be loaded: {}", what, why == nullptr ? path_ : why);
}

void* Plugin::find(const char* name) const {
  void* found = ::dlsym(library_, name);
  require<Unsupported>(found != nullptr, "{} is no tessera plugin: it has no {}", path_, name);
  return found;
}

void Plugin::require_version(const char* name, int version) const {
  const int found = symbol<int (*)()>(name)();
  require<Unsupported>(found == version,
                       "{} speaks version {} of the plugin interface, this program version {}",
                       path_, found, version);
}

}  // namespace tessera
