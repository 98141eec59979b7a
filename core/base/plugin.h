#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// A shared library of the program that is loaded on demand, so that the program starts where the
/// library's dependencies are missing. Never unloaded, because errors, threads and objects of it
/// may outlive this.
class Plugin {
 public:
  /// @param what      for messages: "CUDA backend"
  /// @param file      "libtessera_cuda.so", searched next to the program, in ../lib/tessera, and
  ///   where the dynamic linker searches: programs that link an installed tessera find its plugins
  /// @param variable  environment variable that overrides the file's path
  /// @param path      if not empty, overrides both
  /// @throws Unsupported naming the missing file or dependency
  Plugin(std::string_view what, std::string_view file, const char* variable,
         const std::string& path);

  /// Path of the file to load, not validated; empty if there is none.
  static std::string locate(std::string_view file, const char* variable);

  /// @throws Unsupported unless the library's function `name` returns `version`
  void require_version(const char* name, int version) const;
  /// A function of the library. @throws Unsupported if it is missing
  template <typename F>
  F symbol(const char* name) const {
    return reinterpret_cast<F>(find(name));
  }

 private:
  void* find(const char* name) const;

  std::string path_;
  void* library_ = nullptr;
};

}  // namespace tessera
