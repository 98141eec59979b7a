#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// A shared library that comes with the program and is loaded on demand, so that the program runs
/// where what the library needs is missing. Never unloaded: its errors, threads and objects may
/// outlive their users.
class Plugin {
 public:
  /// @param what      for messages: "CUDA backend"
  /// @param file      "libtessera_cuda.so", beside the program or in ../lib/tessera
  /// @param variable  of the environment, which may name another file
  /// @param path      if not empty, the file instead of all these
  /// @throws Unsupported naming what is missing
  Plugin(std::string_view what, std::string_view file, const char* variable,
         const std::string& path);

  /// The file to load, which may be unfit; empty if there is none.
  static std::string locate(std::string_view file, const char* variable);

  /// @throws Unsupported unless the library's function `name` returns `version`
  void require_version(const char* name, int version) const;
  /// A function of the library. @throws Unsupported if it has none of that name
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
