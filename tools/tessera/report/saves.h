#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "tools/tessera/report/line_file.h"

namespace tessera::tools {

/// A committed checkpoint's line of saves.jsonl.
struct SaveMetrics {
  std::int64_t step = 0;   ///< updates made
  std::int64_t bytes = 0;  ///< of all ranks' shards
  double seconds = 0;      ///< from the step's end to the commit
  double stall_ms = 0;     ///< training time that rank 0 lost to it
};

/// Writes saves.jsonl: one object per committed save. Lines wait while the disk is full, as in
/// LineFile.
class SavesWriter {
 public:
  /// Opens the file and drops saves after `resume_step`, which the run repeats.
  /// @throws IoError
  SavesWriter(std::filesystem::path path, std::int64_t resume_step);

  /// {"step", "bytes", "seconds", "gb_per_s", "stall_ms"}. @throws IoError if too many lines wait
  void write(const SaveMetrics& save);
  void flush() { lines_.flush(); }
  std::string take_warning() { return lines_.take_warning(); }

 private:
  LineFile lines_;
};

}  // namespace tessera::tools
