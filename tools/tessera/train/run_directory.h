#pragma once

#include <filesystem>
#include <string>

namespace tessera::tools {

/// Directory of a run, locked by one job at a time. Created by rank 0.
///
///   config.json    resolved configuration
///   metrics.jsonl  see report/metrics.h
///   saves.jsonl    see report/saves.h
///   checkpoints/   see io/FORMAT.md
///   logs/          one file per rank
///   flight/        one record per rank, see comm/flight_recorder.h
///   loss.svg       loss curve, written at the end
///   .lock          host and pid of the lock's holder
///   tokenizer/     copied from model.init_from, for exports
class RunDirectory {
 public:
  /// Creates and locks the directory. The lock ends with the process.
  /// @throws IoError if that fails; InvalidArgument naming the holder if another job has the lock
  explicit RunDirectory(std::filesystem::path path);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

/// Whether a run's directory exists and is unlocked.
bool is_idle_run(const std::filesystem::path& path);

/// Appends lines with UTC times to logs/rank-N.log. Ignores errors, which must not stop a run.
class RankLog {
 public:
  RankLog(const std::filesystem::path& run_dir, int rank);
  void write(const std::string& line) const;

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::tools
