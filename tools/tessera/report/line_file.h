#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace tessera::tools {

/// A file of one JSON object a line that a run appends to, and a resumed run goes on with.
///
/// A full disk must not end a run that goes on without a save: lines that cannot be written wait in
/// memory, at most 1 MiB of them, and go with the next one that can.
class LineFile {
 public:
  /// Opens the file and drops lines that are no objects with an integer `step`, as a last one that
  /// a crash has cut, and those for which `keep` says no. If any go, the file is replaced by a
  /// rename, so that it is never seen half written.
  /// @throws IoError
  LineFile(std::filesystem::path path, const std::function<bool(const nlohmann::json&)>& keep);
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  /// Appends a line. @throws IoError if too many wait
  void write(const nlohmann::ordered_json& line);
  /// Writes lines that wait. @throws IoError naming the file if it cannot
  void flush();
  /// Why lines wait, if they do since the last call; else empty.
  std::string take_warning() { return std::exchange(warning_, {}); }

 private:
  std::string write_waiting();

  std::filesystem::path path_;
  int fd_ = -1;
  std::string waiting_;  // lines, the first maybe without its beginning
  std::string warning_;
};

}  // namespace tessera::tools
