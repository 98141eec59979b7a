#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>

namespace tessera::tools {

/// A file of one JSON object a line that a run appends to, and a resumed run goes on with.
///
/// Lines that a full disk refuses wait in memory, at most 1 MiB, and are written with the next one
/// that fits: a full disk need not end a run.
class LineFile {
 public:
  /// Opens the file and drops lines that are no objects with an integer `step` (a crash may cut the
  /// last one) and those for which `keep` is false; the shorter file replaces it by a rename.
  /// @throws IoError
  LineFile(std::filesystem::path path, const std::function<bool(const nlohmann::json&)>& keep);
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  /// Appends a line. @throws IoError if over 1 MiB waits
  void write(const nlohmann::ordered_json& line);
  /// Writes the waiting lines. @throws IoError naming the file if it cannot
  void flush();
  /// Why lines began to wait since the last call; else empty.
  std::string take_warning() { return std::exchange(warning_, {}); }

 private:
  std::string write_waiting();

  std::filesystem::path path_;
  int fd_ = -1;
  std::string waiting_;  // lines; the first may be partly written
  std::string warning_;
};

}  // namespace tessera::tools
