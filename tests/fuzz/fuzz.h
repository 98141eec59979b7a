#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "io/base/file.h"

// Shared by the fuzz targets. A target passes if it accepts its input or throws a tessera error
// with a message; libFuzzer reports anything else.
namespace tessera::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Aborts the program, which libFuzzer reports, if a property does not hold.
inline void expect(bool holds) {
  if (!holds) std::abort();
}

template <typename F>
void try_parse(F&& parse) {
  try {
    parse();
  } catch (const Error& error) {
    expect(*error.what() != '\0');
  }
}

/// A file in memory, rewritten with each call's input.
class InputFile {
 public:
  InputFile() : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) { expect(fd_ >= 0); }
  ~InputFile() { ::close(fd_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  std::string write(const std::uint8_t* data, std::size_t size) const {
    expect(::ftruncate(fd_, 0) == 0);
    expect(::pwrite(fd_, data, size, 0) == static_cast<ssize_t>(size));
    return "/proc/self/fd/" + std::to_string(fd_);
  }

 private:
  int fd_;
};

struct Target {
  const char* name;
  const char* seeds;  ///< folder in tests/fuzz/seeds
  int (*run)(const std::uint8_t* data, std::size_t size);
};
/// Targets linked into this program: one for libFuzzer, all for the replay of seeds.
inline std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}
struct Registration {
  explicit Registration(const Target& target) { targets().push_back(target); }
};

}  // namespace tessera::fuzz

/// Defines the target `name`: a function of `data` and `size`, like LLVMFuzzerTestOneInput.
#define TESSERA_FUZZ_TARGET(name, seeds)                               \
  static int fuzz_##name(const std::uint8_t* data, std::size_t size);  \
  static const tessera::fuzz::Registration fuzz_##name##_registration( \
      {#name, seeds, fuzz_##name});                                    \
  static int fuzz_##name(const std::uint8_t* data, std::size_t size)
