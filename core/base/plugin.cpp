#include "core/base/plugin.h"

#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include "core/base/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Directories of the dynamic linker's search, such as the rpath of an installed package.
std::vector<fs::path> linker_directories() {
  Dl_info self{};
  void* object = ::dladdr(reinterpret_cast<void*>(&linker_directories), &self) == 0
                     ? nullptr
                     : ::dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (object == nullptr) object = ::dlopen(nullptr, RTLD_LAZY);  // the program itself
  std::vector<fs::path> directories;
  Dl_serinfo size{};
  if (object != nullptr && ::dlinfo(object, RTLD_DI_SERINFOSIZE, &size) == 0) {
    std::vector<std::max_align_t> buffer(size.dls_size / sizeof(std::max_align_t) + 1);
    auto* const info = reinterpret_cast<Dl_serinfo*>(buffer.data());
    *info = size;
    if (::dlinfo(object, RTLD_DI_SERINFO, info) == 0) {
      const Dl_serpath* const paths = info->dls_serpath;
      for (unsigned i = 0; i < info->dls_cnt; ++i) directories.emplace_back(paths[i].dls_name);
    }
  }
  if (object != nullptr) ::dlclose(object);
  return directories;
}

/// Candidate paths, best first.
std::vector<fs::path> places(std::string_view file, const char* variable) {
  const char* named = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe)
  if (named != nullptr && *named != '\0') return {named};
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  std::vector<fs::path> all{program / file, program.parent_path() / "lib" / "tessera" / file};
  for (const fs::path& directory : linker_directories()) all.push_back(directory / file);
  return all;
}

std::string find_file(std::string_view what, std::string_view file, const char* variable) {
  std::string found = Plugin::locate(file, variable);
  require<Unsupported>(
      !found.empty(),
      "no {}: {} is neither next to the program, nor in ../lib/tessera, nor in the dynamic "
      "linker's directories; build tessera where its libraries are, or set {} or the plugin "
      "option (ContextOptions::plugin) to its path",
      what, file, variable);
  return found;
}

/// Why a file must not be passed to dlopen, else empty. A FIFO would block dlopen; a truncated file
/// would end the process with SIGBUS.
std::string why_unfit(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status)) return {};  // dlopen reports it
  if (error) return error.message();   // such as no access to a parent directory
  if (!fs::is_regular_file(status)) return "not a regular file";
  const auto size = fs::file_size(path, error);
  std::ifstream in(path, std::ios::binary);
  Elf64_Ehdr header{};
  in.read(reinterpret_cast<char*>(&header), sizeof(header));
  if (!in || header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(Elf64_Phdr))
    return {};  // not a library: dlopen reports it
  in.seekg(static_cast<std::streamoff>(header.e_phoff));
  for (int i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment{};
    in.read(reinterpret_cast<char*>(&segment), sizeof(segment));
    if (!in || segment.p_filesz > size || segment.p_offset > size - segment.p_filesz)
      return "the file is truncated";
  }
  return {};
}

}  // namespace

Plugin::Plugin(std::string_view what, std::string_view file, const char* variable,
               const std::string& path)
    : path_(path.empty() ? find_file(what, file, variable) : path) {
  // The dynamic linker searches for a name without a directory, so there is no file to check here.
  const std::string unfit = path_.find('/') == std::string::npos ? "" : why_unfit(path_);
  require<Unsupported>(unfit.empty(), "the {} can't be loaded: {}: {}", what, path_, unfit);
  library_ = ::dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library_ != nullptr) return;
  const char* why = ::dlerror();
  throw Unsupported("the {} can't be loaded: {}", what, why == nullptr ? path_ : why);
}

std::string Plugin::locate(std::string_view file, const char* variable) {
  const std::vector<fs::path> all = places(file, variable);
  if (all.size() == 1) return all.front().string();  // given explicitly: the linker reports errors
  std::error_code ignored;
  const auto at = std::find_if(all.begin(), all.end(),
                               [&](const fs::path& path) { return fs::exists(path, ignored); });
  return at == all.end() ? "" : at->string();
}

void* Plugin::find(const char* name) const {
  void* found = ::dlsym(library_, name);
  require<Unsupported>(found != nullptr, "{} is not a tessera plugin: it has no {}", path_, name);
  return found;
}

void Plugin::require_version(const char* name, int version) const {
  const int found = symbol<int (*)()>(name)();
  require<Unsupported>(found == version,
                       "{} has plugin interface version {}, this program needs version {}", path_,
                       found, version);
}

}  // namespace tessera
