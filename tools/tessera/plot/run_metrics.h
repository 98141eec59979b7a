#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace tessera::tools {

/// Metrics of a run by key of metrics.jsonl.
struct RunMetrics {
  /// Lines of one step: of the step itself and of the evaluation before it.
  struct Row {
    std::int64_t step = 0;
    double tokens = 0;   ///< trained on before the step
    double seconds = 0;  ///< of training, without the time between a stop and a resume
  };
  struct Sample {
    std::size_t row = 0;
    double value = 0;  ///< NaN: null in the file
  };

  std::string name;                                   ///< unique among the runs of a plot
  std::vector<Row> rows;                              ///< by step, ascending
  std::map<std::string, std::vector<Sample>> values;  ///< by row, ascending
  std::vector<std::string> keys;                      ///< of `values`, in the order of the file

  void add(const std::string& key, double value);  ///< to the last row
};

struct RunFile {
  RunMetrics run;
  std::vector<std::string> warnings;  ///< lines that were left out, and why
};

/// Reads a run's metrics.jsonl; the run may be training. Where a step comes again, its last line counts.
/// @param path  run directory, or a file such as metrics.previous.jsonl
/// @throws IoError if there is no such file, or no line with a step in it
RunFile read_run(const std::filesystem::path& path);

/// Names that tell paths apart: the last part, and as many parts before it as are needed.
std::vector<std::string> short_names(const std::vector<std::filesystem::path>& paths);

}  // namespace tessera::tools
