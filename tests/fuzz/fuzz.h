#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/base/error.h"
#include "io/base/file.h"

// What the fuzz targets share. A target passes if whatever it is fed is either taken, or refused by
// one of tessera's errors with a text; libFuzzer reports anything else.
namespace tessera::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Ends the program, for libFuzzer to report, if a promise does not hold.
inline void expect(bool holds) {
  if (!holds) std::abort();
}

/// Calls `parse`, which may refuse its input.
template <typename F>
void try_parse(F&& parse) {
  try {
    parse();
  } catch (const Error& error) {
    expect(*error.what() != '\0');
  }
}

/// A file in memory that holds the input of one call after the other.
class InputFile {
 public:
  InputFile() : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) { expect(fd_ >= 0); }
  ~InputFile() { ::close(fd_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// Path of the file, which now holds the input.
  std::string write(const std::uint8_t* data, std::size_t size) const {
    expect(::ftruncate(fd_, 0) == 0);
    expect(::pwrite(fd_, data, size, 0) == static_cast<ssize_t>(size));
    return "/proc/self/fd/" + std::to_string(fd_);
  }

 private:
  int fd_;
};

}  // namespace tessera::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
