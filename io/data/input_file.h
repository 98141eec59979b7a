#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera::io {

/// A regular file, open for reading at any offset. Thread-safe; move-only.
///
/// Read with pread, not mapped: a file that shrinks or fails while training runs is a typed error
/// instead of a SIGBUS, and a row of a batch costs well under a microsecond either way.
class InputFile {
 public:
  /// @throws IoError if it is missing, unreadable, a directory or any other than a regular file
  explicit InputFile(std::string path);
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;
  ~InputFile();

  const std::string& path() const { return path_; }
  /// Bytes, when it was opened.
  std::int64_t size() const { return size_; }
  /// Reads exactly `bytes` bytes. @throws IoError on failure or if the file has become shorter
  void read(std::int64_t offset, std::size_t bytes, void* dst) const;
  /// The whole file. @throws IoError
  std::string read_all() const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
};

}  // namespace tessera::io
