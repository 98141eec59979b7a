#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "tools/tessera/report/line_file.h"

namespace tessera::tools {

/// A committed checkpoint, one line of saves.jsonl.
struct SaveMetrics {
  std::int64_t step = 0;   ///< updates made
  std::int64_t bytes = 0;  ///< over all ranks
  double seconds = 0;      ///< from the end of the step to the commit
  double stall_ms = 0;     ///< stalled training on rank 0
};

/// Writes saves.jsonl, {"step", "bytes", "seconds", "gb_per_s", "stall_ms"} per committed save. See
/// LineFile for a full disk.
class SavesWriter {
 public:
  /// Opens the file and drops saves after `resume_step`.
  /// @throws IoError
  SavesWriter(std::filesystem::path path, std::int64_t resume_step);

  /// @throws IoError if over 1 MiB is buffered
  void write(const SaveMetrics& save);
  void flush() { lines_.flush(); }
  std::string take_warning() { return lines_.take_warning(); }

 private:
  LineFile lines_;
};

}  // namespace tessera::tools
