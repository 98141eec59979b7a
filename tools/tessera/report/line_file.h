#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>

namespace tessera::tools {

/// A JSON Lines file that a run, and later the resumed run, appends to. Buffers up to 1 MiB while
/// the disk is full.
class LineFile {
 public:
  /// Opens the file. Drops lines without an integer `step` (a crash may truncate the last one) and
  /// lines for which `keep` is false, and replaces the file by rename.
  /// @throws IoError
  LineFile(std::filesystem::path path, const std::function<bool(const nlohmann::json&)>& keep);
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  /// Appends a line. @throws IoError if over 1 MiB is buffered
  void write(const nlohmann::ordered_json& line);
  /// Writes the buffered lines. @throws IoError naming the file
  void flush();
  /// Error that made buffering start since the last call; else empty.
  std::string take_warning() { return std::exchange(warning_, {}); }

 private:
  std::string write_waiting();

  std::filesystem::path path_;
  int fd_ = -1;
  std::string waiting_;  // buffered lines; the first may be partly written
  std::string warning_;
};

}  // namespace tessera::tools
