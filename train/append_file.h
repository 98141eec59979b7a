#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

namespace tessera::train {

/// A file to append to. Buffers up to 1 MiB while the disk is full, and drops what comes then.
class AppendFile {
 public:
  /// Opens or creates the file. @throws IoError, also if it is no regular file
  explicit AppendFile(std::filesystem::path path);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  void write(std::string_view record);
  /// Writes the buffered data. @throws IoError naming the file, and the number of lost records
  void flush();
  /// Error that made buffering start since the last call; else empty.
  std::string take_warning() { return std::exchange(warning_, {}); }

 private:
  std::string write_waiting();

  std::filesystem::path path_;
  int fd_ = -1;
  std::string waiting_;  // buffered data, of which a part may be written
  std::int64_t lost_ = 0;
  bool is_full_ = false;  // until waiting records were written
  std::string warning_;
};

}  // namespace tessera::train
