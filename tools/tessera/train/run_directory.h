#pragma once

#include <filesystem>
#include <string>

namespace tessera::tools {

/// The directory of a run, locked by one job at a time. Made by rank 0.
///
///   config.json    resolved configuration
///   metrics.jsonl  see report/metrics.h
///   saves.jsonl    see report/saves.h
///   checkpoints/   see io/FORMAT.md
///   logs/          one file per rank
///   flight/        one record per rank, see comm/flight_recorder.h
///   loss.svg       at the end
///   .lock          the process that holds the directory
///   tokenizer/     of model.init_from, for exports
class RunDirectory {
 public:
  /// Makes and locks it. The lock ends with the process.
  /// @throws IoError if it cannot be made; InvalidArgument naming the holder if another job has it
  explicit RunDirectory(std::filesystem::path path);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

/// Whether a run's directory is unlocked at this moment.
bool is_idle_run(const std::filesystem::path& path);

/// Appends lines with UTC times to logs/rank-N.log of a run. Ignores errors: they must not stop a
/// run.
class RankLog {
 public:
  RankLog(const std::filesystem::path& run_dir, int rank);
  void write(const std::string& line) const;

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::tools
