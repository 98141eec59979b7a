#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "train/append_file.h"

namespace tessera::train {

/// A JSON Lines file that a run, and later the resumed run, appends to.
class LineFile {
 public:
  /// Opens the file. Drops lines without an integer `step` (a crash may truncate the last one) and
  /// lines for which `keep` is false, and replaces the file by rename.
  /// @throws IoError
  LineFile(std::filesystem::path path, const std::function<bool(const nlohmann::json&)>& keep);

  /// Appends a line; see AppendFile.
  void write(const nlohmann::ordered_json& line);
  void flush() { file_.flush(); }
  std::string take_warning() { return file_.take_warning(); }

 private:
  AppendFile file_;
};

}  // namespace tessera::train
